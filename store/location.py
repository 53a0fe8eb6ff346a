"""Where the store is."""

from __future__ import annotations

import os
from pathlib import Path

import sqlalchemy as sa
import sqlalchemy.exc

from probes.errors import StoreError

ENVIRONMENT_VARIABLE = "CAEE_STORE"


def default_location() -> str:
    """``caee.db`` in the platform's folder for the user's data."""
    import platformdirs

    return str(Path(platformdirs.user_data_dir("caee", appauthor=False)) / "caee.db")


def resolve(location: str | None) -> sa.URL:
    """The URL of a path or URL; of ``CAEE_STORE``, else of the default, where it is None. Raises ``StoreError``."""
    text = location or os.environ.get(ENVIRONMENT_VARIABLE) or default_location()
    if "://" not in text:
        return sa.URL.create("sqlite", database=str(Path(text).expanduser()))
    try:
        return sa.make_url(text)
    except (sqlalchemy.exc.ArgumentError, ValueError) as error:
        raise StoreError(
            f"{text!r} is no database URL", hint="write for example postgresql+psycopg://user@host/database"
        ) from error


def sqlite_file(url: sa.URL) -> Path | None:
    """The file behind an SQLite URL; None for a database in memory or on a server."""
    if url.get_backend_name() != "sqlite" or url.database in (None, "", ":memory:"):
        return None
    return Path(str(url.database))


def shown(url: sa.URL) -> str:
    """The path of an SQLite file; else the URL without its password."""
    file = sqlite_file(url)
    return str(file) if file is not None else url.render_as_string(hide_password=True)


def prepare_file(file: Path, *, create: bool) -> None:
    """Make the folder of a new SQLite file. Raises ``StoreError`` where none can or, without ``create``, does exist."""
    try:
        if file.is_dir():
            raise StoreError(f"{file} is a folder, not a store", hint=f"name a file, for example {file / 'caee.db'}")
        if file.exists():
            return
        if not create:
            raise StoreError(f"there is no store at {file}", hint="caee probe makes one; --store names another")
        file.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise StoreError(
            f"the store cannot be at {file}: a part of that path is a file", hint="name another with --store PATH"
        ) from error
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise StoreError(
            f"the store cannot be at {file}: {reason}",
            hint="name a file in a folder you may write to with --store PATH",
        ) from error
