"""Audits: try to refute the claimed epsilon, with the real engine, before somebody else does.

``weightclip audit`` runs all of them on a set of small trainers; each is also a function for trainers of your own:

- :func:`falsify` searches for a record whose gradient exceeds its certified bound; :func:`climb` does so by trial, for
  models that torch.func cannot transform;
- :func:`step_law` measures exactly how far one record moves a step, over hostile neighbouring data sets;
- :func:`run_law` checks noise, sampling and ledger of a run against what the engine states;
- :func:`estimator_check` sends canary rows through ``fit`` of the estimators;
- :func:`sampled_releases`, :func:`two_worlds` and :func:`one_run` give lower bounds of epsilon from samples;
  :func:`judge` gives that of canaries of your own;
- :func:`audit_trainer` takes anybody's trainer, as a function from data to what it releases.

Imports `accounting`, `certificate`, `engine`, `factors`, `losses`, `nn`, `noise` and `tabular`; imported by `cli`.
"""

from __future__ import annotations

from weightclip.audit._accountants import AccountantRow as AccountantRow
from weightclip.audit._accountants import compare_accountants as compare_accountants
from weightclip.audit._built_in import subjects as subjects
from weightclip.audit._checks import AUDITS as AUDITS
from weightclip.audit._checks import EXACT as EXACT
from weightclip.audit._checks import FULL as FULL
from weightclip.audit._checks import QUICK as QUICK
from weightclip.audit._checks import Check as Check
from weightclip.audit._checks import Effort as Effort
from weightclip.audit._checks import Examination as Examination
from weightclip.audit._checks import gdp_estimate_of as gdp_estimate_of
from weightclip.audit._estimators import Canary as Canary
from weightclip.audit._estimators import canaries as canaries
from weightclip.audit._estimators import estimator_check as estimator_check
from weightclip.audit._falsifier import Falsification as Falsification
from weightclip.audit._falsifier import LayerFinding as LayerFinding
from weightclip.audit._falsifier import climb as climb
from weightclip.audit._falsifier import falsify as falsify
from weightclip.audit._figures import audit_figure as audit_figure
from weightclip.audit._figures import printed_figure as printed_figure
from weightclip.audit._figures import tightness_figure as tightness_figure
from weightclip.audit._figures import trainer_figure as trainer_figure
from weightclip.audit._figures import write_report as write_report
from weightclip.audit._neighbours import Neighbours as Neighbours
from weightclip.audit._neighbours import hostile_neighbours as hostile_neighbours
from weightclip.audit._neighbours import rounding_neighbours as rounding_neighbours
from weightclip.audit._one_run import OneRun as OneRun
from weightclip.audit._one_run import judge as judge
from weightclip.audit._one_run import one_run as one_run
from weightclip.audit._one_step import PureLaw as PureLaw
from weightclip.audit._one_step import Shift as Shift
from weightclip.audit._one_step import StepLaw as StepLaw
from weightclip.audit._one_step import pure_law as pure_law
from weightclip.audit._one_step import step_law as step_law
from weightclip.audit._releases import SampledReleases as SampledReleases
from weightclip.audit._releases import WholeRun as WholeRun
from weightclip.audit._releases import claimed_curve as claimed_curve
from weightclip.audit._releases import sampled_releases as sampled_releases
from weightclip.audit._releases import two_worlds as two_worlds
from weightclip.audit._run_law import RunLaw as RunLaw
from weightclip.audit._run_law import run_law as run_law
from weightclip.audit._statistics import TwoWorlds as TwoWorlds
from weightclip.audit._statistics import clopper_pearson as clopper_pearson
from weightclip.audit._statistics import compare as compare
from weightclip.audit._subject import AuditRun as AuditRun
from weightclip.audit._subject import Records as Records
from weightclip.audit._subject import Subject as Subject
from weightclip.audit._subject import joined as joined
from weightclip.audit._subject import repeated as repeated
from weightclip.audit._suite import Caught as Caught
from weightclip.audit._suite import ExtraAudit as ExtraAudit
from weightclip.audit._suite import Report as Report
from weightclip.audit._suite import run_audit as run_audit
from weightclip.audit._trainer import Trainer as Trainer
from weightclip.audit._trainer import TrainerAudit as TrainerAudit
from weightclip.audit._trainer import audit_trainer as audit_trainer
