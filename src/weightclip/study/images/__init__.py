"""The paper's image experiments: accuracy against epsilon, and time and memory against batch size."""

from __future__ import annotations

from weightclip.study.images._experiment import EPSILONS as EPSILONS
from weightclip.study.images._experiment import ImageStudy as ImageStudy
from weightclip.study.images._features import FeatureMap as FeatureMap
from weightclip.study.images._features import FeatureSettings as FeatureSettings
from weightclip.study.images._heads import HeadTrainer as HeadTrainer
from weightclip.study.images._settings import HeadSettings as HeadSettings
