"""A survey on this machine: what it says is what a look says, and nothing stops it for good."""

import errno
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

import keyquery as kq
from keyquery import survey
from keyquery.instruments.lineage.index import among, index_files
from keyquery.survey import executors as crews
from keyquery.survey import worker as work
from keyquery.survey.executors import Cores, gather
from keyquery.survey.find_models import find_models
from tests.survey.checkpoints import ENVIRONMENT, llama, results

parquet = pytest.importorskip("pyarrow.parquet")


@pytest.fixture
def models(tmp_path):
    return [llama(tmp_path / "zoo" / f"m{i}", layers=3, seed=i, alike=0.3 * i) for i in range(2)]


@pytest.fixture
def measured(monkeypatch):
    """Counts how often each layer is measured; `measured.after` is called when one is."""
    real, counts = work.look_at_layer, Counter()
    counts.after = lambda: None

    def count(layer, heads):
        found = real(layer, heads)
        counts[heads.source.label, layer.index] += 1
        counts.after()
        return found

    monkeypatch.setattr(work, "look_at_layer", count)
    return counts


def test_rows_are_those_of_look(models, tmp_path):
    reading = survey.run([*models, kq.models.ENCODER], tmp_path / "out", workers=1)
    table = parquet.read_table(tmp_path / "out" / "heads.parquet").to_pylist()
    assert [(row["model"], row["layer"], row["head"]) for row in table] == sorted(
        (row["model"], row["layer"], row["head"]) for row in table
    )
    for source, name in ((models[0], "m0"), (models[1], "m1"), (kq.models.ENCODER, "encoder")):
        look = kq.look(source)
        rows = [row for row in table if row["model"] == name]
        records = look.records()
        assert [{key: row[key] for key in record} for row, record in zip(rows, records, strict=True)] == records
        assert (tmp_path / "out" / "models" / f"{name}.json").read_text() == look.to_json() + "\n"
        assert (tmp_path / "out" / "models" / f"{name}.html").read_text() == look.page()
        (told,) = (row for row in reading.models if row["name"] == name)
        assert told["symmetry"] == pytest.approx(sum(r["raw_symmetry"] for r in records) / len(records), abs=1e-15)
        assert told["symmetry_together"] == pytest.approx(
            sorted(row["raw"]["symmetry"] for row in look.layers)[len(look.layers) // 2], abs=0.2
        )
    assert [(row["family"], row["attention"]) for row in reading.models] == [
        ("keyquery", "bidirectional"),
        ("llama", "causal"),
        ("llama", "causal"),
    ]
    assert reading.models[1]["parameters"] == 3 * (16 * 16 + 16 * 16 + 16)
    assert kq.Reading.load(tmp_path / "out" / "survey.json") == reading


@pytest.mark.parametrize("when", [1, 6])
def test_broken_off_it_goes_on_and_measures_nothing_twice(when, models, tmp_path, measured):
    survey.run(models, tmp_path / "whole", workers=1)
    measured.clear()

    def stop():
        if measured.total() == when:
            raise KeyboardInterrupt

    measured.after = stop
    with pytest.raises(KeyboardInterrupt):
        survey.run(models, tmp_path / "parts", workers=1)
    measured.after = lambda: None
    survey.run(models, tmp_path / "parts", workers=1)
    # The one that was under way is measured again, no other.
    assert sorted(measured.values()) == [1, 1, 1, 1, 1, 2]
    assert results(tmp_path / "parts") == results(tmp_path / "whole")
    measured.clear()
    survey.run(models, tmp_path / "parts", workers=1)
    assert not measured
    assert results(tmp_path / "parts") == results(tmp_path / "whole")


def test_only_what_has_changed_is_measured_again(models, tmp_path, measured):
    survey.run(models, tmp_path / "out", workers=1)
    llama(models[0], layers=3, seed=7)
    os.utime(models[0] / "model.safetensors", ns=(1, 1))
    measured.clear()
    survey.run(models, tmp_path / "out", workers=1)
    assert {Path(source).name for source, _ in measured} == {"m0"}
    survey.run(models, tmp_path / "new", workers=1)
    assert results(tmp_path / "out") == results(tmp_path / "new")


def test_a_record_that_a_crash_has_spoiled_is_made_again(models, tmp_path, measured):
    measured.after = lambda: measured.total() == 3 and (_ for _ in ()).throw(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        survey.run(models, tmp_path / "out", workers=1)
    measured.after = lambda: None
    record = next((tmp_path / "out" / "records").rglob("layer-0001-*.json"))
    record.write_text("")
    survey.run(models, tmp_path / "out", workers=1)
    survey.run(models, tmp_path / "whole", workers=1)
    assert results(tmp_path / "out") == results(tmp_path / "whole")
    shutil.rmtree(tmp_path / "out" / "records")  # without its records a survey starts again
    survey.run(models, tmp_path / "out", workers=1)
    assert results(tmp_path / "out") == results(tmp_path / "whole")


def test_models_that_join_later_rename_what_is_there_and_measure_nothing_twice(models, tmp_path, measured):
    survey.run(models, tmp_path / "out", workers=1)
    measured.clear()
    other = llama(tmp_path / "other" / "m0", seed=9)
    survey.run([*models, other], tmp_path / "out", workers=1)
    assert {Path(source) for source, _ in measured} == {other}
    survey.run([*models, other], tmp_path / "new", workers=1)
    assert results(tmp_path / "out") == results(tmp_path / "new")
    assert sorted(os.listdir(tmp_path / "out" / "models"))[::2] == ["m1.html", "other-m0.html", "zoo-m0.html"]


def test_broken_checkpoints_are_told_and_do_not_stop_the_others(models, tmp_path):
    bad = tmp_path / "zoo" / "bad"
    bad.mkdir()
    (bad / "model.safetensors").write_bytes(b"\xff" * 100)
    nan = llama(tmp_path / "zoo" / "nan")
    data = (nan / "model.safetensors").read_bytes()
    (nan / "model.safetensors").write_bytes(data[:-64] + b"\xff" * 64)
    reading = survey.run([tmp_path / "zoo", "no/such_folder.safetensors"], tmp_path / "out", workers=1)
    assert [row["name"] for row in reading.models] == ["m0", "m1"]
    assert {row["name"] for row in reading.broken} == {"bad", "nan", "such_folder.safetensors"}
    why = {row["name"]: row["why"] for row in reading.broken}
    assert "not a readable safetensors file" in why["bad"]
    assert "are NaN or infinite" in why["nan"]
    assert "neither a file, nor a folder" in why["such_folder.safetensors"]
    with pytest.raises(ValueError, match="none of the 1 models could be read; bad: "):
        survey.run([bad], tmp_path / "none", workers=1)


def test_a_file_that_disappears_breaks_its_model_only(models, tmp_path, measured):
    gone = models[0] / "model.safetensors"
    kept = gone.read_bytes()
    times = gone.stat().st_atime_ns, gone.stat().st_mtime_ns
    measured.after = lambda: (str(gone), 0) in measured and gone.unlink(missing_ok=True)
    reading = survey.run([gone, models[1]], tmp_path / "out", workers=1)
    assert [row["name"] for row in reading.models] == ["m1"]
    assert [(row["name"], row["why"]) for row in reading.broken] == [("model.safetensors", f"{gone} no longer exists")]
    measured.after = lambda: None
    measured.clear()
    gone.write_bytes(kept)
    os.utime(gone, ns=times)
    reading = survey.run([gone, models[1]], tmp_path / "out", workers=1)  # it is back: only the rest is measured
    assert reading.broken == []
    assert sorted(layer for _, layer in measured) == [1, 2]


def test_a_model_that_changes_meanwhile_is_told(models, tmp_path, measured):
    def change():
        if measured.total() == 1:
            llama(models[0], layers=3, seed=5)
            os.utime(models[0] / "model.safetensors", ns=(1, 1))

    measured.after = change
    reading = survey.run(models, tmp_path / "out", workers=1)
    assert "changed during the survey" in reading.broken[0]["why"]
    assert [row["name"] for row in reading.models] == ["m1"]


def test_a_full_disk_stops_the_survey_in_a_sentence_and_it_goes_on(models, tmp_path, monkeypatch, measured):
    real, writes = work.write_all, []

    def full(written, token):
        writes.append(written)
        if len(writes) == 3:
            raise OSError(errno.ENOSPC, "could not be written: No space left on device")
        real(written, token)

    monkeypatch.setattr(work, "write_all", full)
    with pytest.raises(OSError, match="No space left on device"):
        survey.run(models, tmp_path / "out", workers=1)
    done = set(measured)
    measured.clear()
    survey.run(models, tmp_path / "out", workers=1)
    assert len(done & set(measured)) == 1  # what could not be recorded
    survey.run(models, tmp_path / "whole", workers=1)
    assert results(tmp_path / "out") == results(tmp_path / "whole")


def test_a_worker_that_sees_another_folder_or_has_other_versions_is_refused(models, tmp_path):
    survey.run(models, tmp_path / "out", workers=1)
    (entry,) = find_models(models[:1])
    versions = tuple(kq.reading.provenance()["versions"].items())
    token = (tmp_path / "out" / "records" / "here").read_text().split()[-1]
    job = work.Job("open", entry, str(tmp_path / "out"), token, versions)
    assert work.perform(job)["joined"]
    with pytest.raises(OSError, match="another survey is writing to it"):
        work.perform(work.replace(job, token="other"))
    with pytest.raises(OSError, match="a worker cannot find it"):
        work.perform(work.replace(job, out=str(tmp_path / "elsewhere")))
    with pytest.raises(OSError, match=r"a worker has torch .*, the survey 0.1: versions must be the same"):
        work.perform(work.replace(job, versions=(("torch", "0.1"),)))


def test_out_that_is_a_file_and_the_extra_that_is_missing_are_told(models, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match=r"out must be a folder, but .* is a file"):
        survey.run(models, tmp_path / "file")
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(ImportError, match=r"a scheduler needs dask: pip install 'keyquery\[survey\]'"):
        survey.run(models, tmp_path / "out", scheduler="tcp://127.0.0.1:1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r"a survey needs pyarrow: pip install 'keyquery\[survey\]'"):
        survey.run(models, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_killed_at_any_moment_it_goes_on(tmp_path):
    models = [str(llama(tmp_path / "zoo" / f"m{i}", layers=12, width=256, seed=i)) for i in range(4)]
    command = [sys.executable, "-m", "keyquery", "survey", *models, "--workers", "2", "-q", "--out"]
    subprocess.run([*command, tmp_path / "whole"], check=True, env=ENVIRONMENT)
    records = tmp_path / "parts" / "records"
    for enough in (lambda: len(list(records.glob("*/layer-*"))) >= 3, lambda: list(records.glob("*/whole-*"))):
        process = subprocess.Popen([*command, tmp_path / "parts"], env=ENVIRONMENT, stderr=subprocess.DEVNULL)
        while process.poll() is None and not enough():
            time.sleep(0.01)
        process.kill()
        assert process.wait() == -signal.SIGKILL
    joined = {file: file.stat().st_mtime_ns for file in records.glob("*/whole-*")}
    subprocess.run([*command, tmp_path / "parts"], check=True, env=ENVIRONMENT)
    assert results(tmp_path / "parts") == results(tmp_path / "whole")
    assert {file: file.stat().st_mtime_ns for file in joined} == joined
    assert len(joined) < 4


@pytest.mark.slow
def test_a_process_that_is_killed_is_replaced(tmp_path, monkeypatch):
    models = [llama(tmp_path / "zoo" / f"m{i}", layers=3, seed=i) for i in range(2)]
    survey.run(models, tmp_path / "alone", workers=1)
    crew = Cores(2)
    monkeypatch.setattr(sys.modules["keyquery.survey.run"], "Cores", lambda workers: crew)
    killed = []

    def watch(items, what, total):
        for item in items:
            yield item
            if what == "measuring layers" and not killed:
                killed.extend(crew._pool._processes)
                os.kill(killed[0], signal.SIGKILL)

    survey.run(models, tmp_path / "out", workers=2, progress=watch)
    assert killed
    assert results(tmp_path / "out") == results(tmp_path / "alone")


class Fragile:
    """A crew of which every worker dies over one job."""

    ahead, alone, lost, fatal = 4, True, (crews.BrokenExecutor,), ()

    def __init__(self, deadly):
        self.deadly, self.opened, self.done = deadly, 0, []

    def open(self, replace=False):
        self.opened += 1
        return self

    def submit(self, perform, job):
        future = crews.Future()
        if job == self.deadly:
            future.set_exception(crews.BrokenExecutor())
        else:
            self.done.append(job)
            future.set_result({"job": job})
        return future

    def alive(self):
        return True

    def close(self):
        pass


@pytest.mark.unchecked
def test_a_job_that_kills_its_workers_is_found_out_and_the_others_are_done():
    crew = Fragile("c")
    found = dict(gather(crew, crews.deque("abcdef")))
    assert found.pop("c") == {"broken": "3 workers died while processing it, maybe out of memory"}
    assert found == {job: {"job": job} for job in "abdef"}
    assert crew.opened <= 1 + 3 + 1


def test_leftovers_of_a_killed_run_are_removed(models, tmp_path):
    out = tmp_path / "out"
    survey.run(models, out, workers=1)
    whole, killed = results(out), (out / "records" / "here").read_text().split()[-1]
    record = next((out / "records").glob("m0-*"))
    for left in (out / "models" / f".m0.html.x.{killed}", out / f".heads.parquet.y.{killed}", record / f".z.{killed}"):
        left.touch()
    survey.run(models, out, workers=1)
    assert results(out) == whole
    assert not list(out.rglob(".*"))


def test_no_file_of_the_user_is_deleted(tmp_path, monkeypatch):
    """`keyquery survey models --out .`, where the models' own folder is the one that results are written into."""
    llama(tmp_path / "models" / "m0")
    mark = "0" * 32
    own = ["models/.env", "models/.gitattributes", ".index.html.bak", ".heads.parquet.old", f"models/.m0.html.{mark}"]
    for name in own:
        (tmp_path / name).write_text("mine")
    (tmp_path / "models" / ".git").mkdir()
    monkeypatch.chdir(tmp_path)
    survey.run(["models"], ".", workers=1)
    record = next((tmp_path / "records").glob("m0-*"))
    notes = [record / "notes.txt", record / ".notes.json"]
    for path in notes:
        path.write_text("mine")
    llama(tmp_path / "models" / "m0", seed=1)  # so that it is measured and joined again
    survey.run(["models"], ".", workers=1)
    assert [(tmp_path / name).read_text() for name in own] == ["mine"] * len(own)
    assert [path.read_text() for path in notes] == ["mine", "mine"]
    assert (tmp_path / "models" / ".git").is_dir()
    assert len(list(record.glob("whole-*.json"))) == 1


@pytest.mark.parametrize("name", ["index.html", "models/m1.json"])
def test_results_replace_no_file_that_a_survey_did_not_write(name, models, tmp_path):
    path = tmp_path / "out" / name
    path.parent.mkdir(parents=True)
    path.write_text("mine")
    with pytest.raises(
        FileExistsError, match=rf"{name} exists and was not written by a survey: choose another folder for out"
    ):
        survey.run(models, tmp_path / "out", workers=1)
    assert path.read_text() == "mine"
    assert [file for file in (tmp_path / "out").rglob("*") if file.is_file()] == [path]


@pytest.mark.parametrize("text", ["", "bak"])
def test_a_manifest_that_no_survey_wrote_is_refused(text, models, tmp_path):
    manifest = tmp_path / "out" / "records" / "here"
    manifest.parent.mkdir(parents=True)
    manifest.write_text(text)
    if text:
        with pytest.raises(ValueError, match="here was not written by a survey: choose another folder for out"):
            survey.run(models, tmp_path / "out", workers=1)
        assert manifest.read_text() == text
    else:
        assert survey.run(models, tmp_path / "out", workers=1).broken == []


def test_a_page_that_the_user_changed_is_kept_when_its_model_is_renamed(models, tmp_path):
    survey.run(models, tmp_path / "out", workers=1)
    (tmp_path / "out" / "models" / "m0.html").write_text("mine")
    survey.run([*models, llama(tmp_path / "other" / "m0", seed=9)], tmp_path / "out", workers=1)
    assert (tmp_path / "out" / "models" / "m0.html").read_text() == "mine"
    assert not (tmp_path / "out" / "models" / "m0.json").exists()


def test_fingerprints_are_an_index_in_which_relatives_are_found(models, tmp_path):
    out = tmp_path / "out"
    survey.run(models, out, workers=1)
    files = index_files(out / "fingerprints")
    assert [file.name for file in files] == ["m0.safetensors", "m1.safetensors"]
    relatives = {row["model"]: row["related"] for row in among(models[1], files).rows}
    assert relatives["m1"]
    assert not relatives["m0"]
    before = files[0].read_bytes()
    files[0].unlink()
    survey.run(models, out, workers=1)  # a missing one is written again, and is the same
    assert files[0].read_bytes() == before


def test_files_of_a_former_name_that_changed_since_are_kept(tmp_path):
    for folder, name in (("models", "m.html"), ("models", "m.json"), ("fingerprints", "m.safetensors")):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / name).write_text("a")
    digest = hashlib.sha256(b"a").hexdigest()
    work.Written("m", "of another page", digest, digest).remove(tmp_path)
    assert [path.name for path in tmp_path.rglob("*.*")] == ["m.html"]
