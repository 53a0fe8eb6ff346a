"""What a database driver's error means to the person who met it."""

from __future__ import annotations

import sqlalchemy.exc

from probes.errors import StoreError


class DamagedStoreError(StoreError):
    """The database file itself is damaged."""


# By the name of SQLite's primary result code: what happened, what to do.
_SQLITE = {
    "SQLITE_BUSY": ("is in use by another process", "try again when that process has finished"),
    "SQLITE_LOCKED": ("is in use by another process", "try again when that process has finished"),
    "SQLITE_FULL": ("cannot grow: the disk is full", "free some space, or keep it elsewhere with --store PATH"),
    "SQLITE_IOERR": ("cannot be read or written: the disk reports an error", "look at the disk, its space and quota"),
    "SQLITE_READONLY": ("may not be written", "ask for write permission, or keep another with --store PATH"),
    "SQLITE_PERM": ("may not be opened", "ask for permission, or keep another with --store PATH"),
    "SQLITE_AUTH": ("may not be opened", "ask for permission, or keep another with --store PATH"),
    "SQLITE_CANTOPEN": ("cannot be opened", "look at the permissions of the file and its folder, or use --store PATH"),
    "SQLITE_NOTADB": ("is not a database", "name another file with --store PATH"),
}
# What the driver says of a database that is sound as such but not as a store.
_DAMAGE_REASONS = ("Could not decode to UTF-8", "no such table", "no such column")
_DAMAGED = ("is damaged", "caee store check says what is affected; restore the file from a copy")


def explain(error: Exception, location: str) -> StoreError:
    """The ``StoreError`` for what SQLAlchemy or the driver under it raised."""
    origin = error.orig if isinstance(error, sqlalchemy.exc.DBAPIError) else error
    code = getattr(origin, "sqlite_errorname", None) or ""
    # An extended code begins with its primary one: SQLITE_IOERR_WRITE.
    primary = "_".join(code.split("_")[:2])
    reason = " ".join(str(origin).split())
    # The driver cannot even decode its own message where that quotes a damaged schema.
    damaged = primary == "SQLITE_CORRUPT" or isinstance(origin, UnicodeDecodeError)
    if damaged or reason.startswith(_DAMAGE_REASONS):
        what, hint = _DAMAGED
        return DamagedStoreError(f"the store {location} {what} ({reason})", hint=hint)
    if primary in _SQLITE:
        what, hint = _SQLITE[primary]
        return StoreError(f"the store {location} {what} ({reason})", hint=hint)
    return StoreError(f"the store {location} failed: {reason}", hint="name another with --store PATH|URL")
