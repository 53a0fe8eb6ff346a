"""Schema 1: records with the rows of their links, samples, models and runs.

The statements are written out, and not taken from ``store.schema``, which moves on with later versions.
"""

from __future__ import annotations

import sqlalchemy as sa


def upgrade(connection: sa.Connection) -> None:
    metadata = sa.MetaData()
    sa.Table(
        "records",
        metadata,
        sa.Column("sequence", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("record_id", sa.String(128), nullable=False, unique=True),
        sa.Column("kind", sa.String(32), nullable=False),
        sa.Column("created_at", sa.String(64), nullable=False),
        sa.Column("summary", sa.Text, nullable=False),
        sa.Column("machine", sa.String(64)),
        sa.Column("size_bytes", sa.BigInteger, nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("document", sa.Text, nullable=False),
        sa.Index("records_by_kind", "kind", "created_at"),
    )
    sa.Table(
        "dependencies",
        metadata,
        _owner("record_id"),
        sa.Column("needed_id", sa.String(128), primary_key=True),
        sa.Index("dependencies_by_needed", "needed_id"),
    )
    sa.Table(
        "links",
        metadata,
        _owner("probe_id"),
        _position("link"),
        *_link_columns(),
        sa.Column("status", sa.String(32), nullable=False),
        sa.Column("bandwidth_median_bytes_per_s", sa.Double),
        sa.Column("details", sa.Text, nullable=False),
    )
    sa.Table(
        "samples",
        metadata,
        sa.Column("probe_id", sa.String(128), primary_key=True),
        _position("link"),
        _position("position"),
        sa.Column("size_bytes", sa.BigInteger, nullable=False),
        sa.Column("seconds", sa.Text, nullable=False),
        sa.ForeignKeyConstraint(["probe_id", "link"], ["links.probe_id", "links.link"], ondelete="CASCADE"),
    )
    sa.Table(
        "models",
        metadata,
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
    sa.Table(
        "runs",
        metadata,
        _owner("run_id"),
        sa.Column("model", sa.Text, nullable=False),
        sa.Column("model_family", sa.Text, nullable=False),
        sa.Column("tier", sa.String(32), nullable=False),
        sa.Column("devices", sa.Integer, nullable=False),
        sa.Column("policy", sa.Text, nullable=False),
        sa.Column("policy_parameters", sa.Text, nullable=False),
        sa.Column("gain_ttft", sa.Double, nullable=False),
        sa.Column("gain_tpot", sa.Double, nullable=False),
    )
    metadata.create_all(connection)


def _owner(name: str) -> sa.Column[str]:
    """The record that a row belongs to, and goes with."""
    reference = sa.ForeignKey("records.record_id", ondelete="CASCADE")
    return sa.Column(name, sa.String(128), reference, primary_key=True)


def _position(name: str) -> sa.Column[int]:
    return sa.Column(name, sa.Integer, primary_key=True, autoincrement=False)


def _link_columns() -> tuple[sa.Column[str], ...]:
    return (
        sa.Column("kind", sa.String(32), nullable=False),
        sa.Column("source", sa.String(64), nullable=False),
        sa.Column("destination", sa.String(64), nullable=False),
        sa.Column("mode", sa.String(32)),
        sa.Column("concurrency", sa.String(32), nullable=False),
    )
