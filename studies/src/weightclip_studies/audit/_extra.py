"""What ``weightclip-study audit`` adds to ``weightclip audit``."""

from __future__ import annotations

from weightclip.audit import ExtraAudit, Report
from weightclip_studies.audit._heads import HeadTrainer, head_check, head_trainers
from weightclip_studies.audit._printed import catch_printed


def extra_audits() -> list[ExtraAudit]:
    """The image heads' trainer, one record at a time, and the printed algorithms, which the audits must catch."""
    heads = [ExtraAudit(f"image heads: {name}", _head(name, trainer)) for name, trainer in head_trainers().items()]
    return [*heads, ExtraAudit("the printed algorithm", _printed)]


def _head(name: str, trainer: HeadTrainer):
    def run(report: Report) -> None:
        report.checks.append(head_check(name, trainer, 12 if report.quick else 48))

    return run


def _printed(report: Report) -> None:
    report.printed += catch_printed(report.seed, 60_000 if report.quick else 200_000, report.delta)
