"""scikit-learn estimators with a true epsilon: preprocessing, training and prediction for people with a table."""

from weightclip._tabular._columns import Column as Column
from weightclip._tabular._columns import Schema as Schema
from weightclip._tabular._plan import NonPrivateScaling as NonPrivateScaling
from weightclip._tabular._plan import PrivateScaling as PrivateScaling
from weightclip._tabular._plan import PublicScaling as PublicScaling

from ._calibrate import calibrate as calibrate
from ._classifier import LipDPClassifier as LipDPClassifier
from ._importances import Importances as Importances
from ._importances import public_importances as public_importances
from ._inputs import PrivacyCostWarning as PrivacyCostWarning
from ._regressor import LipDPRegressor as LipDPRegressor
