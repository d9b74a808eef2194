# %% [markdown]
# # Choosing epsilon and reading the report
#
# Epsilon bounds how much the presence of one record can change the odds of any conclusion an attacker draws from the
# model: by a factor e^epsilon, but for a chance delta. Run it with ``python examples/choosing_epsilon.py``.

# %%
from __future__ import annotations

import math
import sys

import numpy as np
import pandas as pd

import adult
from weightclip.accounting import Mechanism, NegativeBinomialRuns, epsilon, search_cost
from weightclip.tabular import LipDPClassifier

table, y = adult.load(int(sys.argv[1]) if len(sys.argv) > 1 else 5000)
X, bounds, categories = pd.DataFrame(table), adult.RANGES, adult.CATEGORIES
train, test = adult.parts(len(y))

# %% [markdown]
# ## What it means for one person
# If an attacker thought it even odds that a certain record took part, they can be this sure after seeing the model:

# %%
for e in (0.1, 0.5, 1.0, 3.0, 8.0):
    print(f"epsilon {e:4.1f}: at most {math.exp(e) / (1 + math.exp(e)):.1%} sure")

# %% [markdown]
# ## What it costs in accuracy
# Each fit below is a release of its own. Looking at several and keeping one costs more than the one you keep: do this
# on public or synthetic data of the same size, or account for it (last section).

# %%
majority = max(np.unique(y, return_counts=True)[1]) / len(y)
for e in (0.3, 1.0, 3.0):
    model = LipDPClassifier(epsilon=e, feature_bounds=bounds, categories=categories, random_state=0)
    model.fit(X.iloc[train], y[train])
    accuracy = model.score(X.iloc[test], y[test])
    print(f"epsilon {e:3.1f}: accuracy {accuracy:.3f} (majority class {majority:.3f})")

# %% [markdown]
# ## Reading the report
# Every mechanism is listed with what it takes to recompute epsilon; nothing else touched the records.

# %%
report = model.privacy_report_
print(report["statement"])
listed = [Mechanism(m["kind"], m["sigma"], m["q"], m["steps"], label=m["label"]) for m in report["mechanisms"]]
for m in listed:
    print(
        f"  {m.label:26} sigma {m.sigma:7.3f}, q {m.q:.3f}, {m.steps} steps: alone {epsilon([m], report['delta']):.3f}"
    )
print(f"  together: {epsilon(listed, report['delta']):.4f}, the report says {report['epsilon']:.4f}")
print("not covered:")
for line in report["not_covered"]:
    print(f"  - {line}")

# %% [markdown]
# ## If you must search on private data
# Papernot and Steinke (2022): draw the number of runs at random and release the best only. Ten runs of epsilon 1 on
# average, instead of one:

# %%
once = LipDPClassifier(epsilon=1.0, delta=1e-6, feature_bounds=bounds, categories=categories, epochs=1, random_state=0)
mechanisms = once.fit(X.iloc[train], y[train]).privacy_report_["mechanisms"]
released = [Mechanism(m["kind"], m["sigma"], m["q"], m["steps"]) for m in mechanisms]
print(f"best of about ten: epsilon {search_cost(released, 1e-6, NegativeBinomialRuns(mean=10.0)):.2f}")
