"""Estimators for tables with the conventions of scikit-learn: preprocessing that is paid for, training, model folders.

Imports `accounting`, `certificate`, `distributed`, `engine`, `losses`, `models`, `nn`, `noise` and `sampling`; imported
by `audit`, `cli`, `search` and `text`.
"""

from __future__ import annotations

from weightclip.tabular._checks import check_budget as check_budget
from weightclip.tabular._checks import strict_json as strict_json
from weightclip.tabular._columns import Column as Column
from weightclip.tabular._columns import Schema as Schema
from weightclip.tabular._columns import canonical as canonical
from weightclip.tabular._encoder import Encoder as Encoder
from weightclip.tabular._encoder import Fitted as Fitted
from weightclip.tabular._encoder import fit_public as fit_public
from weightclip.tabular._estimators import LipDPClassifier as LipDPClassifier
from weightclip.tabular._estimators import LipDPRegressor as LipDPRegressor
from weightclip.tabular._explain import Importances as Importances
from weightclip.tabular._explain import calibrate as calibrate
from weightclip.tabular._explain import model_importances as model_importances
from weightclip.tabular._explain import permuted as permuted
from weightclip.tabular._explain import public_importances as public_importances
from weightclip.tabular._fit import fit_classifier as fit_classifier
from weightclip.tabular._fit import fit_regressor as fit_regressor
from weightclip.tabular._inputs import PrivacyCostWarning as PrivacyCostWarning
from weightclip.tabular._model import Model as Model
from weightclip.tabular._plan import FitPlan as FitPlan
from weightclip.tabular._plan import NonPrivateScaling as NonPrivateScaling
from weightclip.tabular._plan import Preprocessing as Preprocessing
from weightclip.tabular._plan import PrivateScaling as PrivateScaling
from weightclip.tabular._plan import PublicScaling as PublicScaling
from weightclip.tabular._private import Door as Door
from weightclip.tabular._private import release as release
from weightclip.tabular._report import mechanisms_of as mechanisms_of
from weightclip.tabular._report import model_card as model_card
from weightclip.tabular._report import privacy_report as privacy_report
from weightclip.tabular._report import recompute as recompute
from weightclip.tabular._report import searched_epsilon as searched_epsilon
from weightclip.tabular._report import settings_json as settings_json
from weightclip.tabular._resume import Checkpoint as Checkpoint
from weightclip.tabular._search import ALL_FAILED as ALL_FAILED
from weightclip.tabular._search import FAILED as FAILED
from weightclip.tabular._search import Board as Board
from weightclip.tabular._search import Drawn as Drawn
from weightclip.tabular._search import OneProcess as OneProcess
from weightclip.tabular._search import SearchPlan as SearchPlan
from weightclip.tabular._search import Task as Task
from weightclip.tabular._search import run_epsilon as run_epsilon
from weightclip.tabular._search import run_of as run_of
from weightclip.tabular._search import search as search
from weightclip.tabular._search import take_part as take_part
from weightclip.tabular._table import Table as Table
from weightclip.tabular._table import frame_columns as frame_columns
from weightclip.tabular._table import to_numbers as to_numbers
from weightclip.tabular._table import to_values as to_values
from weightclip.tabular._training import UNKNOWN as UNKNOWN
from weightclip.tabular._training import Budget as Budget
from weightclip.tabular._training import Settings as Settings
from weightclip.tabular._training import Trained as Trained
from weightclip.tabular._training import root_generator as root_generator
