"""Features learned from nothing: networks trained by contrast on pictures of random processes, never on a data set.

Imported by the feature maps and the commands of the image experiments.
"""

from __future__ import annotations

from weightclip_studies.images.extractor._contrast import ContrastiveTraining as ContrastiveTraining
from weightclip_studies.images.extractor._contrast import Recipe as Recipe
from weightclip_studies.images.extractor._maps import LearnedFeatures as LearnedFeatures
from weightclip_studies.images.extractor._maps import LearnedSettings as LearnedSettings
from weightclip_studies.images.extractor._network import ResNet9 as ResNet9
from weightclip_studies.images.extractor._processes import Processes as Processes
from weightclip_studies.images.extractor._processes import pictures as pictures
from weightclip_studies.images.extractor._samples import contact_sheet as contact_sheet
from weightclip_studies.images.extractor._train import extractor_name as extractor_name
from weightclip_studies.images.extractor._train import train_extractor as train_extractor
from weightclip_studies.images.extractor._views import Views as Views
from weightclip_studies.images.extractor._weights import PLACES as PLACES
from weightclip_studies.images.extractor._weights import Stored as Stored
from weightclip_studies.images.extractor._weights import describe_extractor as describe_extractor
from weightclip_studies.images.extractor._weights import load_extractor as load_extractor
from weightclip_studies.images.extractor._weights import save_extractor as save_extractor
