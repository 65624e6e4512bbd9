"""Files that are written whole or not at all, and only where a file belongs."""

import csv
import errno
import os
import signal
import stat
import subprocess
import sys

import pytest

from keyquery.support import files


def fifo(folder):
    os.mkfifo(folder / "target")


def link_to_fifo(folder):
    os.mkfifo(folder / "pipe")
    (folder / "target").symlink_to("pipe")


def loop(folder):
    (folder / "target").symlink_to("other")
    (folder / "other").symlink_to("target")


@pytest.mark.parametrize(
    ("make", "words"),
    [(fifo, "is a device or a pipe"), (link_to_fifo, "is a device or a pipe"), (loop, "is a circular link")],
)
def test_what_is_no_file_is_never_replaced(make, words, tmp_path):
    make(tmp_path)
    before = {path.name: path.lstat().st_mode for path in tmp_path.iterdir()}
    with pytest.raises(ValueError, match=words):
        files.check_target(tmp_path / "target", force=True)
    with pytest.raises(ValueError, match=words):
        files.write_text(tmp_path / "target", "new")
    assert {path.name: path.lstat().st_mode for path in tmp_path.iterdir()} == before


def test_a_link_to_a_file_stays_a_link(tmp_path):
    (tmp_path / "file").write_text("old")
    (tmp_path / "file").chmod(0o640)
    (tmp_path / "link").symlink_to("file")
    with pytest.raises(FileExistsError, match="use --force to replace it"):
        files.check_target(tmp_path / "link", force=False)
    files.check_target(tmp_path / "link", force=True)
    files.write_text(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "new"
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o640


def test_a_folder_without_permission_is_told_before_any_work(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(os, "access", lambda path, mode: asked.append((path, mode)))  # root may write anywhere
    with pytest.raises(PermissionError, match=rf"a\.json cannot be written: no write permission for {tmp_path}"):
        files.check_target(tmp_path / "a.json", force=False)
    assert asked == [(tmp_path, os.W_OK | os.X_OK)]


def test_errors_name_the_target(tmp_path):
    with pytest.raises(OSError, match=r"none/a\.json could not be written: No such file") as error:
        files.write_text(tmp_path / "none" / "a.json", "text")
    assert ".a.json." not in str(error.value)


def test_all_files_are_written_or_none(tmp_path):
    (tmp_path / "old").write_text("old")
    with pytest.raises(OSError, match="could not be written"):
        files.write_all({tmp_path / "a": "text", tmp_path / "old": b"new", tmp_path / "none" / "b": "text"})
    assert [path.name for path in tmp_path.iterdir()] == ["old"]
    assert (tmp_path / "old").read_text() == "old"
    files.write_all({tmp_path / "a": "text", tmp_path / "old": b"\xff"})
    assert (tmp_path / "old").read_bytes() == b"\xff"


def test_a_long_name_is_a_name(tmp_path):
    files.write_text(tmp_path / ("n" * 250), "text")
    assert len(list(tmp_path.iterdir())) == 1


def test_csv_has_the_keys_of_all_records(tmp_path):
    """The heads of a model with cross-attention have figures on data only where they attend to themselves."""
    files.write_text(
        tmp_path / "a.csv", files.csv_text([{"head": 0}, {"head": 1, "position": 0.25}, {"position": 0.5, "last": "x"}])
    )
    with open(tmp_path / "a.csv") as file:
        rows = list(csv.DictReader(file))
    assert rows == [
        {"head": "0", "position": "", "last": ""},
        {"head": "1", "position": "0.25", "last": ""},
        {"head": "", "position": "0.5", "last": "x"},
    ]


HALF = """
import signal, sys, time
from keyquery.support import files
signal.signal(signal.SIGINT, signal.default_int_handler)  # also where tests run in the background, which ignores it
{how}
"""
# Each writes a part of the new content, says so, and waits to be killed.
HOWS = {
    "a text": """
write = files.Path.write_bytes
def half(path, content):
    write(path, content[:1])
    print("half", flush=True); time.sleep(60)
files.Path.write_bytes = half
files.write_text(sys.argv[1], "new content")
""",
    "what writes by itself": """
with files.writing(sys.argv[1]) as part:
    part.write_text("new"); print("half", flush=True); time.sleep(60)
""",
}


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_kill_in_the_middle_leaves_the_old_file(how, number, tmp_path):
    target = tmp_path / "target"
    target.write_text("old content")
    command = [sys.executable, "-c", HALF.format(how=HOWS[how]), target]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout.readline() == "half\n"
        process.send_signal(number)
        process.wait()
    assert target.read_text() == "old content"
    left = [path.name for path in tmp_path.iterdir() if path != target]
    assert len(left) == (number == signal.SIGKILL)  # an interrupt cleans up; nobody can after a kill
    assert all(name.startswith(".target.") for name in left)
    files.write_text(target, "new content")
    assert target.read_text() == "new content"


MARKED = """
import sys, time
from keyquery.support import files
with files.writing(sys.argv[1], sys.argv[2]) as part:
    part.write_text("new"); print("half", flush=True); time.sleep(60)
"""


def test_what_a_killed_process_left_is_removed_by_its_mark_and_nothing_else(tmp_path):
    mark, target = "0123456789abcdef" * 2, tmp_path / "target"
    command = [sys.executable, "-c", MARKED, target, mark]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "half\n"
        process.kill()
        process.wait()
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".target.")
    mine = [f".target.abcdefgh.{mark[::-1]}", f"target.{mark}", f".{mark}.bak", ".env", mark]
    for name in mine:
        (tmp_path / name).write_text("mine")
    (tmp_path / f".folder.{mark}").mkdir()
    (tmp_path / f".link.{mark}").symlink_to(".env")
    files.remove_temporaries([mark], [tmp_path])
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*mine, f".folder.{mark}", f".link.{mark}"])


@pytest.mark.parametrize("mark", ["", "*", "G" * 32, "a" * 31])
def test_a_mark_that_others_could_have_is_refused(mark, tmp_path):
    (tmp_path / f".a.{mark}").touch()
    with pytest.raises(ValueError, match="marks must be 32 hexadecimal digits each"):
        files.remove_temporaries([mark], [tmp_path])
    assert len(list(tmp_path.iterdir())) == 1


def test_what_is_too_large_to_hold_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "rows"
    path.write_text("old")

    def fill(error):
        with files.writing(path) as beside:
            beside.write_text("half")
            raise error

    with pytest.raises(OSError, match="rows could not be written: No space left"):
        fill(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    with pytest.raises(KeyError):
        fill(KeyError())
    assert os.listdir(tmp_path) == ["rows"]
    assert path.read_text() == "old"
