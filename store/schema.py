"""The tables, as the latest migration leaves them.

Every record is one row of ``records``. What people query has rows of its own: a probe's ``links`` and their
``samples``, a calibration's ``models``. The JSON of a record or of such a row (``document``, ``details``) holds its
other fields, so that nothing is kept twice, but for two copies that serve queries and that ``Store.check`` compares:
the tables ``runs`` and ``policies``, and a link's median bandwidth.
"""

from __future__ import annotations

import sqlalchemy as sa

METADATA = sa.MetaData()

RECORDS = sa.Table(
    "records",
    METADATA,
    sa.Column("sequence", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("record_id", sa.String(128), nullable=False, unique=True),
    sa.Column("kind", sa.String(32), nullable=False),
    sa.Column("created_at", sa.String(64), nullable=False),
    sa.Column("summary", sa.Text, nullable=False),
    sa.Column("machine", sa.String(64), doc="digest of the fingerprint's identity"),
    sa.Column("size_bytes", sa.BigInteger, nullable=False, doc="length of the whole record as JSON"),
    sa.Column("sha256", sa.String(64), nullable=False, doc="of the whole record as JSON"),
    sa.Column("document", sa.Text, nullable=False),
    sa.Index("records_by_kind", "kind", "created_at"),
)


def _owner(name: str) -> sa.Column[str]:
    """The record that a row belongs to, and goes with."""
    reference = sa.ForeignKey("records.record_id", ondelete="CASCADE")
    return sa.Column(name, sa.String(128), reference, primary_key=True)


def _position(name: str) -> sa.Column[int]:
    """Keeps the order of a record's tuple."""
    return sa.Column(name, sa.Integer, primary_key=True, autoincrement=False)


def _link_columns() -> tuple[sa.Column[str], ...]:
    return (
        sa.Column("kind", sa.String(32), nullable=False),
        sa.Column("source", sa.String(64), nullable=False),
        sa.Column("destination", sa.String(64), nullable=False),
        sa.Column("mode", sa.String(32)),
        sa.Column("concurrency", sa.String(32), nullable=False),
    )


DEPENDENCIES = sa.Table(
    "dependencies",
    METADATA,
    _owner("record_id"),
    # No foreign key: what a record was made from may have been deleted, or have stayed on another machine.
    sa.Column("needed_id", sa.String(128), primary_key=True),
    sa.Index("dependencies_by_needed", "needed_id"),
)

LINKS = sa.Table(
    "links",
    METADATA,
    _owner("probe_id"),
    _position("link"),
    *_link_columns(),
    sa.Column("status", sa.String(32), nullable=False),
    sa.Column("bandwidth_median_bytes_per_s", sa.Double),
    sa.Column("details", sa.Text, nullable=False),
)

SAMPLES = sa.Table(
    "samples",
    METADATA,
    sa.Column("probe_id", sa.String(128), primary_key=True),
    _position("link"),
    _position("position"),
    sa.Column("size_bytes", sa.BigInteger, nullable=False),
    sa.Column("seconds", sa.Text, nullable=False, doc="JSON list, in the order taken"),
    sa.ForeignKeyConstraint(["probe_id", "link"], ["links.probe_id", "links.link"], ondelete="CASCADE"),
)

MODELS = sa.Table(
    "models",
    METADATA,
    _owner("calibration_id"),
    _position("position"),
    sa.Column("model_id", sa.String(128), nullable=False),
    *_link_columns(),
    sa.Column("form", sa.String(32), nullable=False),
    sa.Column("alpha", sa.Double, nullable=False),
    sa.Column("bandwidth_bytes_per_s", sa.Double, nullable=False),
    sa.Column("beta_seconds", sa.Double, nullable=False),
    sa.Column("holdout_mape", sa.Double),
    sa.Column("status", sa.String(32), nullable=False),
    sa.Column("details", sa.Text, nullable=False),
)

RUNS = sa.Table(
    "runs",
    METADATA,
    _owner("run_id"),
    sa.Column("model", sa.Text, nullable=False),
    sa.Column("model_family", sa.Text, nullable=False),
    sa.Column("tier", sa.String(32), nullable=False),
    sa.Column("devices", sa.Integer, nullable=False),
    sa.Column("policy", sa.Text, nullable=False),
    sa.Column("policy_parameters", sa.Text, nullable=False),
    sa.Column("gain_ttft", sa.Double),
    sa.Column("gain_tpot", sa.Double, nullable=False),
)

POLICIES = sa.Table(
    "policies",
    METADATA,
    _owner("policy_id"),
    sa.Column("model", sa.Text, nullable=False),
    sa.Column("model_identity", sa.Text, nullable=False),
    sa.Column("tier", sa.String(32), nullable=False),
    sa.Column("devices", sa.Integer, nullable=False),
    sa.Column("cache", sa.Text, nullable=False),
    sa.Column("cache_experts", sa.BigInteger, nullable=False),
    sa.Column("knob", sa.Text, nullable=False),
    sa.Column("max_quality_drop", sa.Double, nullable=False),
    sa.Column("chosen", sa.Double),
    sa.Column("policy", sa.Text),
    sa.Column("policy_parameters", sa.Text),
)
