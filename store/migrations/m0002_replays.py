"""Schema 2: a run may have no gain in time to first token, since replaying a trace generates nothing.

SQLite cannot change a column, so the table is made anew; its rows are copies, but are moved like any other.
"""

from __future__ import annotations

import sqlalchemy as sa


def upgrade(connection: sa.Connection) -> None:
    old = sa.Table("runs", sa.MetaData(), autoload_with=connection)
    rows = [dict(row) for row in connection.execute(sa.select(old)).mappings()]
    old.drop(connection)
    metadata = sa.MetaData()
    sa.Table("records", metadata, sa.Column("record_id", sa.String(128), primary_key=True))
    new = sa.Table(
        "runs",
        metadata,
        sa.Column("run_id", sa.String(128), sa.ForeignKey("records.record_id", ondelete="CASCADE"), primary_key=True),
        sa.Column("model", sa.Text, nullable=False),
        sa.Column("model_family", sa.Text, nullable=False),
        sa.Column("tier", sa.String(32), nullable=False),
        sa.Column("devices", sa.Integer, nullable=False),
        sa.Column("policy", sa.Text, nullable=False),
        sa.Column("policy_parameters", sa.Text, nullable=False),
        sa.Column("gain_ttft", sa.Double),
        sa.Column("gain_tpot", sa.Double, nullable=False),
    )
    new.create(connection)
    if rows:
        connection.execute(sa.insert(new), rows)
