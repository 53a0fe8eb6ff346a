"""Schema 3: a row for each stored policy; records of that kind are unknown to a caee that knows only earlier ones."""

from __future__ import annotations

import sqlalchemy as sa


def upgrade(connection: sa.Connection) -> None:
    metadata = sa.MetaData()
    sa.Table("records", metadata, sa.Column("record_id", sa.String(128), primary_key=True))  # for the reference to it
    policies = sa.Table(
        "policies",
        metadata,
        sa.Column(
            "policy_id", sa.String(128), sa.ForeignKey("records.record_id", ondelete="CASCADE"), primary_key=True
        ),
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
    policies.create(connection)
