"""A survey on this machine: its rows are those of looks, and nothing stops it for good."""

import json
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
from keyquery.survey import executors
from keyquery.survey import worker as work
from keyquery.survey.find_models import find_models
from tests.survey.checkpoints import ENVIRONMENT, llama, results

parquet = pytest.importorskip("pyarrow.parquet")


@pytest.fixture
def models(tmp_path):
    return [llama(tmp_path / "zoo" / f"m{i}", seed=i, alike=0.3 * i) for i in range(2)]


@pytest.fixture
def measured(monkeypatch):
    """Counts how often each model is measured; `measured.after` is called when one is."""
    real, counts = work.look_at, Counter()
    counts.after = lambda: None

    def count(source, **options):
        look = real(source, **options)
        counts[Path(source).name] += 1
        counts.after()
        return look

    monkeypatch.setattr(work, "look_at", count)
    return counts


def test_rows_are_those_of_look(models, tmp_path):
    reading = survey.run([*models, kq.models.ENCODER], tmp_path / "out", workers=1)
    table = parquet.read_table(tmp_path / "out" / "heads.parquet").to_pylist()
    for source, name in ((models[0], "m0"), (models[1], "m1"), (kq.models.ENCODER, "encoder")):
        look = kq.look(source)
        rows = [row for row in table if row["model"] == name]
        records = look.records()
        assert [{key: row[key] for key in record} for row, record in zip(rows, records, strict=True)] == records
        assert (tmp_path / "out" / "models" / f"{name}.json").read_text() == look.to_json() + "\n"
        assert (tmp_path / "out" / "models" / f"{name}.html").read_text() == look.page()
        (row,) = (row for row in reading.models if row["name"] == name)
        assert row["symmetry"] == pytest.approx(sum(r["raw_symmetry"] for r in records) / len(records), abs=1e-15)
    assert [(row["family"], row["attention"]) for row in reading.models] == [
        ("keyquery", "bidirectional"),
        ("llama", "causal"),
        ("llama", "causal"),
    ]
    assert reading.models[1]["parameters"] == 2 * (16 * 16 + 16 * 16 + 16)
    assert kq.Reading.load(tmp_path / "out" / "survey.json") == reading


def test_an_interrupted_survey_resumes_and_measures_nothing_twice(models, tmp_path, measured):
    survey.run(models, tmp_path / "whole", workers=1)
    measured.clear()

    def stop():
        if measured.total() == 2:
            raise KeyboardInterrupt

    measured.after = stop
    with pytest.raises(KeyboardInterrupt):
        survey.run(models, tmp_path / "parts", workers=1)
    measured.after = lambda: None
    for again in ({"m0": 1, "m1": 2}, {}):  # the one that was under way, then none
        survey.run(models, tmp_path / "parts", workers=1)
        assert measured == again
        assert results(tmp_path / "parts") == results(tmp_path / "whole")
        measured.clear()


def test_what_has_changed_or_was_spoiled_is_measured_again(models, tmp_path, measured):
    survey.run(models, tmp_path / "out", workers=1)
    llama(models[0], seed=7)
    os.utime(models[0] / "model.safetensors", ns=(1, 1))
    next((tmp_path / "out" / "records").glob("m1-*.json")).write_text("")
    measured.clear()
    survey.run(models, tmp_path / "out", workers=1)
    assert measured == {"m0": 1, "m1": 1}
    survey.run(models, tmp_path / "new", workers=1)
    assert results(tmp_path / "out") == results(tmp_path / "new")
    shutil.rmtree(tmp_path / "out" / "records")  # without its records a survey starts again
    survey.run(models, tmp_path / "out", workers=1)
    assert results(tmp_path / "out") == results(tmp_path / "new")


def test_models_that_join_later_rename_what_is_there_except_what_the_user_changed(models, tmp_path, measured):
    out = tmp_path / "out"
    survey.run(models, out, workers=1)
    (out / "models" / "m0.html").write_text("mine")
    measured.clear()
    other = llama(tmp_path / "other" / "m0", seed=9)
    survey.run([*models, other], out, workers=1)
    assert measured == {"m0": 2}  # the new one, and the one whose name it changes
    assert (out / "models" / "m0.html").read_text() == "mine"
    (out / "models" / "m0.html").unlink()
    survey.run([*models, other], tmp_path / "new", workers=1)
    assert results(out) == results(tmp_path / "new")
    assert sorted(os.listdir(out / "models"))[::2] == ["m1.html", "other-m0.html", "zoo-m0.html"]
    assert sorted(os.listdir(out / "fingerprints")) == [f"{name}.safetensors" for name in ("m1", "other-m0", "zoo-m0")]


def test_broken_checkpoints_are_listed_and_do_not_stop_the_others(models, tmp_path):
    bad = tmp_path / "zoo" / "bad"
    bad.mkdir()
    (bad / "model.safetensors").write_bytes(b"\xff" * 100)
    nan = llama(tmp_path / "zoo" / "nan")
    data = (nan / "model.safetensors").read_bytes()
    (nan / "model.safetensors").write_bytes(data[:-64] + b"\xff" * 64)
    reading = survey.run([tmp_path / "zoo", "no/such_folder.safetensors"], tmp_path / "out", workers=1)
    assert [row["name"] for row in reading.models] == ["m0", "m1"]
    why = {row["name"]: row["why"] for row in reading.broken}
    assert set(why) == {"bad", "nan", "such_folder.safetensors"}
    assert "not a readable safetensors file" in why["bad"]
    assert "are NaN or infinite" in why["nan"]
    assert "neither a file, nor a folder" in why["such_folder.safetensors"]
    with pytest.raises(ValueError, match="none of the 1 models could be read; bad: "):
        survey.run([bad], tmp_path / "none", workers=1)


def test_a_config_that_changes_meanwhile_is_listed(models, tmp_path, measured):
    """Also where its size and time stay the same."""
    config = models[0] / "config.json"

    def change():
        times = config.stat().st_atime_ns, config.stat().st_mtime_ns
        facts = {**json.loads(config.read_text()), "num_attention_heads": 4, "num_key_value_heads": 4}
        config.write_text(json.dumps(facts))
        os.utime(config, ns=times)

    measured.after = lambda: measured["m1"] or change()
    reading = survey.run(models, tmp_path / "out", workers=1)
    assert [row["name"] for row in reading.models] == ["m1"]
    assert "changed during the survey" in reading.broken[0]["why"]


def test_a_worker_that_sees_another_folder_or_has_other_versions_is_refused(models, tmp_path):
    survey.run(models[:1], tmp_path / "out", workers=1)
    (entry,) = find_models(models[:1])
    versions = tuple(kq.reading.provenance()["versions"].items())
    token = (tmp_path / "out" / "records" / "here").read_text().split()[-1]
    job = work.Job(entry, str(tmp_path / "out"), token, versions)
    assert work.perform(job) == {}
    with pytest.raises(OSError, match="another survey is writing to it"):
        work.perform(work.replace(job, token="other"))
    with pytest.raises(OSError, match="a worker cannot find it"):
        work.perform(work.replace(job, out=str(tmp_path / "elsewhere")))
    with pytest.raises(OSError, match=r"a worker has torch .*, the survey 0.1: versions must be the same"):
        work.perform(work.replace(job, versions=(("torch", "0.1"),)))


def test_out_that_is_a_file_and_a_missing_extra_are_refused(models, tmp_path, monkeypatch):
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
def test_killed_at_any_moment_it_resumes(tmp_path):
    models = [str(llama(tmp_path / "zoo" / f"m{i}", layers=12, width=256, seed=i)) for i in range(4)]
    command = [sys.executable, "-m", "keyquery", "survey", *models, "--workers", "2", "-q", "--out"]
    subprocess.run([*command, tmp_path / "whole"], check=True, env=ENVIRONMENT)
    records = tmp_path / "parts" / "records"
    process = subprocess.Popen([*command, tmp_path / "parts"], env=ENVIRONMENT, stderr=subprocess.DEVNULL)
    while process.poll() is None and not list(records.glob("*.json")):
        time.sleep(0.01)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    done = {file: file.stat().st_mtime_ns for file in records.glob("*.json")}
    assert 0 < len(done) < 4
    subprocess.run([*command, tmp_path / "parts"], check=True, env=ENVIRONMENT)
    assert results(tmp_path / "parts") == results(tmp_path / "whole")
    assert {file: file.stat().st_mtime_ns for file in done} == done


@pytest.mark.slow
def test_a_process_that_is_killed_is_replaced(tmp_path):
    models = [llama(tmp_path / "zoo" / f"m{i}", seed=i) for i in range(3)]
    survey.run(models, tmp_path / "alone", workers=1)
    killed = []

    def watch(items, what, total):
        for item in items:
            if not killed:
                killed.extend(Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split())
                os.kill(int(killed[-1]), signal.SIGKILL)
            yield item

    survey.run(models, tmp_path / "out", workers=2, progress=watch)
    assert killed
    assert results(tmp_path / "out") == results(tmp_path / "alone")


@pytest.mark.unchecked
def test_a_job_that_kills_its_workers_is_reported_and_the_others_are_done(monkeypatch):
    pools = []

    def pool(jobs, workers):
        pools.append(workers)
        jobs = list(jobs)
        while jobs:
            if "c" in jobs[:workers]:  # it runs, and the pool with it ends
                return jobs
            job = jobs.pop(0)
            yield job, {"job": job}
        return []

    monkeypatch.setattr(executors, "_in_pool", pool)
    found = dict(executors.on_cores(list("abcdefgh"), 2))
    assert found.pop("c") == {"broken": executors.DIED}
    assert found == {job: {"job": job} for job in "abdefgh"}
    assert pools == [2, 1, 1, 2]


def test_leftovers_of_a_killed_run_are_removed(models, tmp_path):
    out = tmp_path / "out"
    survey.run(models, out, workers=1)
    whole, killed = results(out), (out / "records" / "here").read_text().split()[-1]
    for name in (f"models/.m0.html.x.{killed}", f".heads.parquet.y.{killed}", f"records/.z.{killed}"):
        (out / name).touch()
    survey.run(models, out, workers=1)
    assert results(out) == whole
    assert not list(out.rglob(".*"))


def test_no_file_of_the_user_is_deleted(tmp_path, monkeypatch):
    """`keyquery survey models --out .`, where the models' own folder is the one that results are written into."""
    llama(tmp_path / "models" / "m0")
    mark = "0" * 32
    own = ["models/.env", ".index.html.bak", f"models/.m0.html.{mark}", "records/notes.txt", "records/.notes.json"]
    (tmp_path / "records").mkdir()
    for name in own:
        (tmp_path / name).write_text("mine")
    (tmp_path / "models" / ".git").mkdir()
    monkeypatch.chdir(tmp_path)
    for seed in (0, 1):
        llama(tmp_path / "models" / "m0", seed=seed)
        survey.run(["models"], ".", workers=1)
    assert [(tmp_path / name).read_text() for name in own] == ["mine"] * len(own)
    assert (tmp_path / "models" / ".git").is_dir()


@pytest.mark.parametrize("name", ["index.html", "models/m1.json", "records/here"])
def test_results_replace_no_file_that_a_survey_did_not_write(name, models, tmp_path):
    path = tmp_path / "out" / name
    path.parent.mkdir(parents=True)
    path.write_text("mine")
    with pytest.raises((FileExistsError, ValueError), match=rf"{path.name} .*was not written by a survey"):
        survey.run(models, tmp_path / "out", workers=1)
    assert [file for file in (tmp_path / "out").rglob("*") if file.is_file()] == [path]
    assert path.read_text() == "mine"


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
