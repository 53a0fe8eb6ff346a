"""``caee store`` on the command line."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from caee_cli.main import run_app
from store.session import open_store

CREATED_AT = "2026-03-01T12:00:00+00:00"
Caee = Callable[..., tuple[int, str, str]]


@pytest.fixture
def location(tmp_path: Path) -> str:
    """A store with three simulations, one of which has a name that would steer a terminal."""
    path = str(tmp_path / "caee.db")
    with open_store(path) as store:
        for number in (1, 2):
            store.save_simulation(
                f"sim-{number}", CREATED_AT, {"schema": "caee.simulate/1", "policies": [{"name": "é"}]}
            )
        store.save_simulation("wild", CREATED_AT, {"trace": "\x1b[2J[red]x[/red][/] :smile:"})
    return path


@pytest.fixture
def caee(capsys: pytest.CaptureFixture[str], location: str, monkeypatch: pytest.MonkeyPatch) -> Caee:
    """Exit code, standard output and standard error of a command on that store."""
    monkeypatch.setenv("CAEE_STORE", location)

    def run(*arguments: str) -> tuple[int, str, str]:
        code = run_app(list(arguments))
        out, err = capsys.readouterr()
        return code, out, err

    return run


def test_list(caee: Caee, location: str) -> None:
    code, out, _ = caee("store", "list")
    assert code == 0
    assert location in out
    assert "sim-1" in out
    assert "1 result" in out


def test_list_as_json(caee: Caee, location: str) -> None:
    code, out, err = caee("store", "list", "--json", "--kind", "simulation")
    document = json.loads(out)
    assert (code, err) == (0, "")
    assert (document["schema"], document["location"]) == ("caee.store.list/1", location)
    assert [record["record_id"] for record in document["records"]] == ["wild", "sim-2", "sim-1"]
    assert document["records"][1] == {
        "kind": "simulation",
        "record_id": "sim-2",
        "created_at": CREATED_AT,
        "summary": "1 result",
        "size_bytes": document["records"][1]["size_bytes"],
    }


def test_an_unknown_kind_is_wrong_usage(caee: Caee) -> None:
    code, out, err = caee("store", "list", "--kind", "song")
    assert (code, out) == (2, "")
    assert "'song' is no kind of record" in err


def test_show_does_not_obey_what_it_shows(caee: Caee) -> None:
    code, out, _ = caee("store", "show", "wild")
    assert code == 0
    assert "\x1b" not in out
    assert "\\x1b[2J[red]x[/red][/] :smile:" in out


def test_show_as_json_is_the_whole_document(caee: Caee) -> None:
    code, out, _ = caee("store", "show", "sim-1", "--json")
    document = json.loads(out)
    assert code == 0
    assert document["schema"] == "caee.store.show/1"
    assert document["document"] == {"schema": "caee.simulate/1", "policies": [{"name": "é"}]}


@pytest.mark.parametrize("command", ["show", "export", "delete"])
def test_an_id_that_fits_none_or_several(caee: Caee, command: str) -> None:
    code, out, err = caee("store", command, "nothing")
    assert (code, out) == (1, "")
    assert "no record has the id 'nothing'" in err
    assert "caee store list" in err
    code, out, err = caee("store", command, "sim")
    assert (code, out) == (1, "")
    assert "2 ids begin with 'sim': sim-1, sim-2" in err


def test_a_store_that_is_not_there(caee: Caee, tmp_path: Path) -> None:
    for command in (["list"], ["show", "x"], ["export", "x"], ["delete", "x"], ["check"]):
        code, out, err = caee("store", *command, "--store", str(tmp_path / "none.db"))
        assert (code, out) == (1, "")
        assert "there is no store at" in err
    assert not (tmp_path / "none.db").exists()


def test_export_and_import(caee: Caee, tmp_path: Path) -> None:
    file, other = tmp_path / "export.json", str(tmp_path / "other.db")
    code, out, err = caee("store", "export", "sim-1", "wild", "-o", str(file))
    assert (code, out) == (0, "")
    assert f"Wrote {file}: sim-1, wild" in err
    code, _, err = caee("store", "export", "sim-1", "-o", str(file))
    assert code == 2
    assert "--force" in err
    code, out, _ = caee("store", "export", "sim-1", "wild", "-o", str(file), "--force", "--json")
    assert (code, json.loads(out)["records"]) == (0, ["sim-1", "wild"])
    code, out, _ = caee("store", "export", "sim-1", "wild")
    assert (code, json.loads(out)) == (0, json.loads(file.read_text()))

    code, out, _ = caee("store", "import", str(file), "--store", other, "--json")
    assert code == 0
    assert json.loads(out) == {
        "schema": "caee.store.import/1",
        "location": other,
        "added": ["sim-1", "wild"],
        "present": [],
    }
    code, _, err = caee("store", "import", str(file), "--store", other)
    assert code == 0
    assert "Added nothing; 2 were kept already" in err


def test_importing_what_is_no_export(caee: Caee, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{}")
    code, out, err = caee("store", "import", str(tmp_path / "a.json"))
    assert (code, out) == (1, "")
    assert "no export of caee" in err


def test_delete(caee: Caee) -> None:
    code, out, err = caee("store", "delete", "sim-1", "sim-2")
    assert (code, out) == (0, "")
    assert "Deleted sim-1, sim-2" in err
    code, out, _ = caee("store", "delete", "wild", "--json")
    assert (code, json.loads(out)["deleted"]) == (0, ["wild"])
    assert json.loads(caee("store", "list", "--json")[1])["records"] == []


def test_check_of_a_sound_store(caee: Caee, location: str) -> None:
    code, out, _ = caee("store", "check")
    assert (code, f"{location} is sound" in " ".join(out.split())) == (0, True)
    code, out, _ = caee("store", "check", "--json")
    assert (code, json.loads(out)["ok"], json.loads(out)["problems"]) == (0, True, [])


def test_check_of_a_damaged_store(caee: Caee, location: str) -> None:
    connection: Any = sqlite3.connect(location)
    connection.execute("UPDATE records SET document = '{}' WHERE record_id = 'sim-2'")
    connection.commit()
    code, out, err = caee("store", "check")
    assert (code, "sim-2" in out) == (3, True)
    assert "is damaged" in err
    code, out, _ = caee("store", "check", "--json")
    (problem,) = json.loads(out)["problems"]
    assert (code, json.loads(out)["ok"], problem["record_id"], problem["damage"]) == (3, False, "sim-2", True)


def test_check_of_a_store_too_damaged_to_be_opened(caee: Caee, location: str) -> None:
    content = bytearray(Path(location).read_bytes())
    content[100:110] = b"\xff" * 10  # the header of the page that holds the schema
    Path(location).write_bytes(content)
    code, out, err = caee("store", "check", "--json")
    document = json.loads(out)
    assert (code, document["ok"], len(document["problems"])) == (3, False, 1)
    assert "is damaged" in err
    assert caee("store", "list")[0] == 1
