# %% [markdown]
# # A first private model from a CSV
#
# You have a table and a privacy officer. This takes one command, or three lines of Python; the epsilon it prints covers
# the preprocessing too. Run it with ``python examples/first_private_model.py``.

# %%
from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import pandas as pd

import adult
from weightclip.cli import main as weightclip
from weightclip.tabular import LipDPClassifier

folder = Path(tempfile.mkdtemp(prefix="weightclip-tutorial-"))
rows = int(sys.argv[1]) if len(sys.argv) > 1 else 48842


def command(line: str) -> None:
    """What you would type in a shell."""
    print(f"$ weightclip {line}")
    try:
        weightclip(line.split())
    except SystemExit as done:
        assert done.code == 0, line


# %% [markdown]
# ## The table
# The bundled Adult census extract, written as an ordinary CSV.

# %%
table, income = adult.load(rows)
frame = pd.DataFrame(table)
frame.assign(income=income).to_csv(folder / "adult.csv", index=False)

# %% [markdown]
# ## One command
# Nothing is known of the columns but their names: ranges, quantiles and frequent categories are estimated *within* the
# budget. The folder holds the weights, the pipeline, `privacy.json` and a model card, and no pickle.

# %%
command(f"train {folder}/adult.csv --target income --epsilon 1 --seed 0 --out {folder}/model")
command(f"predict {folder}/model {folder}/adult.csv --out {folder}/predictions.csv --proba")
command(f"certify {folder}/model")

# %%
report = json.loads((folder / "model" / "privacy.json").read_text())
for m in report["mechanisms"]:
    print(f"{m['label']:28} sigma {m['sigma']:8.2f}  steps {m['steps']:4d}  epsilon alone {m['epsilon']:.3f}")
print(report["statement"])

# %% [markdown]
# ## The same in Python, knowing more
# What you know without looking at the records costs nothing: a schema with ranges and categories leaves more of the
# budget for training. `random_state` makes a tutorial repeatable; leave it out in earnest, so that noise is secret.

# %%
known = {"age": (17, 90), "education-num": (1, 16), "capital-gain": (0, 99999), "capital-loss": (0, 4356),
         "hours-per-week": (1, 99)}  # fmt: skip
model = LipDPClassifier(epsilon=1.0, feature_bounds=known, categories=adult.CATEGORIES, random_state=0)
model.fit(frame, income)
print(f"accuracy on the training records (itself not private to show): {model.score(frame, income):.3f}")
print(f"epsilon {model.epsilon_:.4f} at delta {model.delta_:g}")
