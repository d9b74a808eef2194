"""Private training of dense networks at full speed: the engine's mechanism, written out for stacks of runs.

The engine puts hooks on any model and pays some milliseconds of Python a step; a network for a table needs less than
one millisecond of arithmetic. Here the same mechanism (SOUNDNESS sections 1, 4 and 6) is a short loop over stacked
matrix products, for several settings and seeds at once.

>>> import numpy as np
>>> X = np.random.default_rng(0).normal(size=(200, 3))
>>> settings = [Settings(hidden=(4,), batch=20, epochs=2, lr=lr) for lr in (0.01, 0.1)]
>>> runs = train_many(X, X[:, 0] > 0, settings, seeds=(0, 1), objective=Logistic(), noise=Budget(1.0, 1e-4))
>>> [[tuple(w.shape) for w, _ in run.weights] for run in runs[0]], logits([runs[0][0], runs[1][1]], X).shape
([[(4, 3), (1, 4)], [(4, 3), (1, 4)]], torch.Size([2, 200, 1]))
"""

from ._objectives import Absolute as Absolute
from ._objectives import Huber as Huber
from ._objectives import Logistic as Logistic
from ._objectives import Objective as Objective
from ._objectives import Softmax as Softmax
from ._settings import Adam as Adam
from ._settings import Budget as Budget
from ._settings import Settings as Settings
from ._settings import Sgd as Sgd
from ._train import Run as Run
from ._train import logits as logits
from ._train import train_many as train_many
