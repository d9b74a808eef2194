"""The paper's image experiments: accuracy against epsilon, and time and memory against batch size."""

from __future__ import annotations

from weightclip_studies.images._experiment import EPSILONS as EPSILONS
from weightclip_studies.images._experiment import ImageStudy as ImageStudy
from weightclip_studies.images._features import FeatureMap as FeatureMap
from weightclip_studies.images._features import FeatureSettings as FeatureSettings
from weightclip_studies.images._heads import HeadTrainer as HeadTrainer
from weightclip_studies.images._settings import HeadSettings as HeadSettings
