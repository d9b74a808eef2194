"""The paper's algorithms exactly as printed, for comparison only. Their epsilon is *claimed*, never guaranteed.

Reproduced here are Lip-DP-SGD (Algorithm 1 of [Barczewski2025]), Fix-Lip-DP-SGD (the same with
``c_k <- C`` in ClipWeights) and DP-SGD with per-layer clipping (Algorithm 2), beside DP-SGD as practitioners run it
(flat clipping, through Opacus). To train privately use :class:`weightclip.PrivacyEngine`; to see how far the claims
below are from the truth run ``weightclip audit``.

Flaws of SOUNDNESS section 2 that this package reproduces **deliberately**:

1. the gradient sum is divided by ``X_k``, the largest input norm *of the batch*: one added record rescales everybody;
2. each of K layers gets noise ``sigma * Delta_k``, and the K releases are accounted as one: the true multiplier is
   ``sigma / sqrt(K)`` (Algorithm 2 shares this one);
3. ``Delta_k = tau * prod_{i >= k} c_i`` where the product must start at ``k + 1``: too little noise when ``c_k < 1``;
4. ``X_k`` leaves out the 1 that multiplies the bias;
5. the release is divided by the *realised* batch size, so its noise level reveals that size (Algorithm 2 as well);
6. empty batches are redrawn, which changes the sampling rate (Algorithm 2 as well);
7. convolutions: ``c_k`` is the norm of the kernel matrix, without ``sqrt(h'w')``, and so is ``X_k``;
8. ``||W||_2`` comes from a few power iterations, which converge from below: weights are left above ``C``;
9. every layer without parameters gets ``c_k = 1``, also group normalisation (1 / alpha), GELU (1.13) and
   overlapping pooling (2);
10. the best of many runs is reported at one run's epsilon: nothing here charges a search.

Where the text leaves a choice: ``||theta_k||_p`` is the norm of the weight matrix and ClipWeights rescales the bias
with it; all layers' gradients are taken at the same weights; ``T`` counts steps, as in the loop of Algorithm 1, though
the text calls it epochs; where ``X_k = 0`` (every input of the batch is zero) nothing is divided.
"""

from __future__ import annotations

from weightclip_studies.printed._algorithms import PerRecord as PerRecord
from weightclip_studies.printed._algorithms import PublishedRelease as PublishedRelease
from weightclip_studies.printed._algorithms import Training as Training
from weightclip_studies.printed._algorithms import bjorck as bjorck
from weightclip_studies.printed._algorithms import clip_weights as clip_weights
from weightclip_studies.printed._algorithms import cross_entropy as cross_entropy
from weightclip_studies.printed._algorithms import dpsgd_step as dpsgd_step
from weightclip_studies.printed._algorithms import lip_step as lip_step
from weightclip_studies.printed._algorithms import power_iteration as power_iteration
from weightclip_studies.printed._algorithms import published_sensitivities as published_sensitivities
from weightclip_studies.printed._opacus import OpacusDPSGD as OpacusDPSGD
from weightclip_studies.printed._stacked import stacked_clip_weights as stacked_clip_weights
from weightclip_studies.printed._stacked import stacked_dpsgd_step as stacked_dpsgd_step
from weightclip_studies.printed._stacked import stacked_lip_step as stacked_lip_step
from weightclip_studies.printed._stacked import stacked_poisson as stacked_poisson
from weightclip_studies.printed._trainers import CLAIM_NOTE as CLAIM_NOTE
from weightclip_studies.printed._trainers import PublishedDPSGD as PublishedDPSGD
from weightclip_studies.printed._trainers import PublishedLip as PublishedLip
from weightclip_studies.printed._trainers import claimed_epsilon as claimed_epsilon
