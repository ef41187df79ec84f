"""Sweeps: what is run, kept and found again, and what becomes of failures."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import estr
from estr.errors import ConfigError, DataError, WorkerDied, WorkerError
from estr.lab import job as job_module
from estr.lab.job import Job
from estr.lab.progress import SweepProgress
from estr.lab.sweep import Sweep
from estr.lab.table import rows_by_job, write_table

TESTS = Path(__file__).parent


def job(number: int, **config) -> Job:
    config = {"number": number, "log": "log", **config}
    return Job({"number": number}, config, function="lab_jobs:measured")


def odd(kind: str) -> Job:
    return Job({"kind": kind}, {"kind": kind}, function="lab_jobs:odd")


@pytest.fixture(autouse=True)
def workers_find_jobs(tmp_path, monkeypatch):
    path = f"{tmp_path}{os.pathsep}{TESTS}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.chdir(tmp_path)


def made(tmp_path) -> list[str]:
    log = tmp_path / "log"
    return sorted(log.read_text().split()) if log.exists() else []


class Told:
    """Implements `estr.lab.sweep.Progress`; keeps what it was told."""

    def __init__(self):
        self.said = []

    def begin(self, num_jobs, num_cached):
        self.said.append(("begin", num_jobs, num_cached))

    def done(self, job, seconds):
        self.said.append(("done", *job.labels.values()))

    def failed(self, job, reason):
        self.said.append(("failed", *job.labels.values()))

    def tell(self, line):
        self.said.append(line)


# Kept


def test_a_job_is_run_once_and_kept(tmp_path):
    jobs = [job(n) for n in range(3)]
    first = Sweep(tmp_path, processes=2).run(jobs)
    assert [(r["number"], r["value"]) for r in first] == [(0, 0.0), (1, 0.1), (2, 0.2)]
    told = Told()
    again = Sweep(tmp_path, processes=1, progress=told).run([*jobs, jobs[0], job(3)])
    assert [r["number"] for r in again] == [0, 1, 2, 0, 3]
    assert made(tmp_path) == ["0", "1", "2", "3"]
    assert told.said == [("begin", 4, 3), ("done", 3)]
    assert {p.suffix for p in (tmp_path / "cache").iterdir()} == {".json"}


def test_what_another_machine_made_is_taken_over(tmp_path):
    there, here = tmp_path / "there", tmp_path / "here"
    rows = Sweep(there, processes=1).run([job(0), job(1)])
    write_table(rows, there / "table.parquet")
    tables = rows_by_job([there / "table.parquet"])
    told = Told()
    sweep = Sweep(here, processes=1, progress=told, elsewhere=tables)
    assert sweep.run([job(0), job(1)]) == rows
    assert [row["value"] for row in sweep.run([job(1), job(2)])] == [0.1, 0.2]
    assert made(tmp_path) == ["0", "1", "2"]
    assert told.said == [("begin", 2, 2), ("begin", 2, 1), ("done", 2)]
    assert Sweep(here, processes=1).run([job(0), job(1)]) == rows
    Sweep(tmp_path, processes=1, progress=told, elsewhere=tables).run([job(7)])
    assert "none of these 1 runs is in the tables of --from" in told.said[3]


def test_what_is_no_table_is_named(tmp_path):
    path = tmp_path / "table.parquet"
    for harm in (
        lambda: path.write_bytes(b""),
        lambda: path.write_bytes(b"PAR1" * 9),
        lambda: write_table([{"measure": "accuracy", "step": 1, "value": 1.0}], path),
    ):
        harm()
        with pytest.raises(ConfigError, match=r"table\.parquet is no table of `estr lab`"):
            rows_by_job([path])
    write_table([{"measure": "a", "step": 1, "value": "x", "job": job(0).digest}], path)
    with pytest.raises(ConfigError, match="no rows of a run: a value must be a number"):
        Sweep(tmp_path, processes=1, elsewhere=rows_by_job([path])).run([job(0)])


@pytest.mark.parametrize("how", ["SIGKILL", "SIGTERM", "SIGINT"])
def test_a_killed_sweep_goes_on_where_it_was(tmp_path, how):
    code = (
        "from pathlib import Path; from estr.lab.sweep import Job, Sweep\n"
        "jobs = [Job({'number': n}, {'number': n, 'log': 'log', 'until': '.' if n < 2 else 'go'}, "
        "'lab_jobs:measured') for n in range(3)]\n"
        "Sweep(Path('.'), processes=1).run(jobs)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=tmp_path, stderr=subprocess.PIPE, text=True
    )
    try:
        deadline = time.monotonic() + 200
        while len(list(tmp_path.glob("cache/*.json"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:
        process.send_signal(signal.Signals[how])
        said = process.communicate(timeout=30)[1]
    kept = f"Interrupted: stopped; finished runs are kept in {Path('cache')}"
    assert how == "SIGKILL" or kept in said
    assert made(tmp_path) == ["0", "1"]
    (tmp_path / "go").touch()
    jobs = [job(n, until="." if n < 2 else "go") for n in range(3)]
    assert len(Sweep(tmp_path, processes=1).run(jobs)) == 3
    # The worker that outlived its parent for a moment may have seen the file as well.
    assert made(tmp_path)[:2] == ["0", "1"]
    assert set(made(tmp_path)[2:]) == {"2"}
    assert {p.suffix for p in (tmp_path / "cache").iterdir()} == {".json"}


def test_two_sweeps_on_one_folder_share_the_work(tmp_path):
    jobs = [job(n, sleep=0.3) for n in range(4)]
    told = [Told(), Told()]
    sweeps = [Sweep(tmp_path, processes=1, progress=its) for its in told]
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda sweep: sweep.run(jobs), sweeps)
    assert first == second
    assert made(tmp_path) == ["0", "1", "2", "3"]
    assert [sum(line[0] == "done" for line in its.said) for its in told] == [4, 4]


def test_what_is_torn_or_foreign_is_made_anew_and_told_before_all_else(tmp_path):
    (tmp_path / "cache").mkdir()
    its = {"function": "lab_jobs:measured", "seconds": 1.0}
    row = {"measure": "accuracy", "step": 1, "value": 9.0}
    texts = [
        "",
        '{"rows": [',
        "null",
        "[" * 100_000,
        '{"rows": []}',
        b"\xff\xfe\x00",
        *(
            json.dumps({**its, "config": dict(job(n).config), "rows": rows})
            for n, rows in ((6, []), (7, None), (8, [1]), (9, [{}]), (10, {"a": 1}))
        ),
        json.dumps({**its, "config": {"number": 99, "log": "log"}, "rows": [row]}),
        json.dumps({**its, "function": "x:y", "config": dict(job(12).config), "rows": [row]}),
    ]
    for n, text in enumerate(texts):
        path = tmp_path / "cache" / f"{job(n).digest}.json"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    told = Told()
    jobs = [job(n) for n in range(len(texts))]
    rows = Sweep(tmp_path, processes=1, progress=told).run(jobs)
    assert [r["value"] for r in rows] == [n / 10 for n in range(13)]
    lines = told.said[:13]
    assert all("torn or foreign" in line and "made anew" in line for line in lines)
    assert [job(n).digest in line for n, line in enumerate(lines)] == [True] * 13
    assert told.said[13] == ("begin", 13, 0)
    assert Sweep(tmp_path, processes=1).run(jobs) == rows


def test_labels_of_the_job_win(tmp_path):
    (row,) = Sweep(tmp_path, processes=1).run([odd("forged")])
    assert (row["kind"], row["axis"], row["job"]) == ("forged", 1, odd("forged").digest)


# Failures


def test_what_failed_is_named_and_the_rest_is_kept(tmp_path):
    jobs = [job(0, fails=True), job(1), job(2, dies=True), job(3)]
    told = Told()
    with pytest.raises(WorkerError, match=r"2 of 4 runs failed, first .'number': 0..*no such luck"):
        Sweep(tmp_path, processes=1, progress=told).run(jobs)
    assert made(tmp_path) == ["1", "3"]
    assert told.said == [("begin", 4, 0), ("failed", 0), ("done", 1), ("failed", 2), ("done", 3)]
    assert len(Sweep(tmp_path, processes=1).run([jobs[1], jobs[3]])) == 2
    assert made(tmp_path) == ["1", "3"]


def test_rows_that_cannot_be_kept_are_their_jobs_failure(tmp_path):
    kinds = ["none", "empty", "no rows", "no measure", "text", "numpy", "numpy label"]
    told = Told()
    with pytest.raises(WorkerError, match=r"7 of 8 runs failed, first .*must be a list"):
        Sweep(tmp_path, processes=1, progress=told).run([*map(odd, kinds), job(1)])
    assert told.said[1:] == [*(("failed", kind) for kind in kinds), ("done", 1)]
    assert len(list((tmp_path / "cache").glob("*.json"))) == 1


def test_a_hung_job_costs_only_itself(tmp_path):
    hung = dataclasses.replace(job(0, sleep=300), limit_s=1.0)
    with pytest.raises(WorkerError, match=r"1 of 3 runs failed.*no result within 1 s"):
        Sweep(tmp_path, processes=1).run([hung, job(1), job(2)])
    assert made(tmp_path) == ["1", "2"]


def test_a_death_comes_with_the_last_lines_of_its_log(tmp_path):
    with pytest.raises(WorkerError, match=r"(?s)exit status 7.*last lines of .*famous last words"):
        Sweep(tmp_path, processes=1).run([job(0, dies=True)])


def test_a_fault_of_all_ends_the_sweep(tmp_path):
    alike = dataclasses.replace(job(1, refuses="lr = -1"), alike=True)
    with pytest.raises(ConfigError, match=r"run .'number': 1.: lr = -1"):
        Sweep(tmp_path, processes=1).run([job(0), alike, job(2)])
    assert made(tmp_path) == ["0"]
    with pytest.raises(WorkerError, match=r"1 of 2 runs failed.*lr = -1"):
        Sweep(tmp_path, processes=1).run([job(1, refuses="lr = -1"), job(2)])
    assert made(tmp_path) == ["0", "2"]


def test_a_place_that_cannot_be_written_is_refused_before_compute(tmp_path):
    (tmp_path / "cache").write_text("")
    with pytest.raises(ConfigError, match=r"nothing can be written in .*cache.*--out"):
        Sweep(tmp_path, processes=1).run([job(0)])
    assert made(tmp_path) == []


def test_a_file_that_cannot_be_kept_is_the_plain_error(tmp_path):
    place = tmp_path / "cache" / f"{job(0).digest}.json"
    (place / "in the way").mkdir(parents=True)
    with pytest.raises(DataError, match=f"{place.name} cannot be written.*--out"):
        Sweep(tmp_path, processes=2).run([job(0), job(1, until="never")])
    assert [p for p in (tmp_path / "cache").iterdir() if p.name.startswith(".")] == []


def test_a_worker_that_does_not_start_is_the_plain_error(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import os\nprint('no torch here', flush=True)\nos._exit(9)\n"
    )
    with pytest.raises(WorkerDied, match=r"(?s)exit status 9.*no torch here"):
        Sweep(tmp_path, processes=2).run([job(0), job(1)])


def test_more_processes_than_cores_are_told(tmp_path):
    cores = os.cpu_count()
    for processes in (cores, cores + 1):
        told = Told()
        Sweep(tmp_path, processes=processes, progress=told)
        assert len(told.said) == processes - cores
    assert f"--jobs {cores + 1} on {cores} cores" in told.said[0]


def test_a_progress_that_nobody_reads_ends_nothing():
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", buffering=1) as stream:
        with SweepProgress(stream) as progress:
            progress.begin(3, 1)
            progress.done(job(1), 0.1)
            progress.failed(job(2), "no such luck")
        # What the stream still holds cannot be written either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), writer)


def test_failures_are_told_and_count_as_done(tmp_path):
    with open(tmp_path / "told", "w+") as stream:
        with SweepProgress(stream) as progress:
            progress.begin(3, 1)
            progress.failed(job(1), "no such\x1b luck" + "!" * 600)
            progress.begin(2, 0)
        stream.seek(0)
        first, second, third = stream.read().splitlines()
    assert first == "3 runs, 1 of them kept from before"
    assert second.startswith("failed: number 1: no such\\x1b luck!!!")
    assert second.endswith("!...")
    assert third == "2 runs, 0 of them kept from before"


# Digests

MODULES = (
    "training",
    "natural",
    "own",
    "token_noise",
    "switch_tokens",
    "gradients",
    "noise_floor",
)


def test_the_digest_follows_function_and_configuration_but_not_labels():
    one = Job({"a": 1}, {"x": 1})
    assert one.digest == Job({"a": 2}, {"x": 1}, limit_s=None, alike=True).digest
    assert one.digest != Job({"a": 1}, {"x": 2}).digest
    assert one.digest != Job({"a": 1}, {"x": 1}, function="lab_jobs:measured").digest
    assert job_module.code_digest("estr.lab.training") != job_module.code_digest("estr.lab.own")


_LOADED = """
import importlib, os, sys
import torch, transformers  # once for all
for name in sys.argv[1:]:
    if os.fork() == 0:
        importlib.import_module(name)
        own = [m for n, m in sys.modules.items() if n.partition(".")[0] == "estr"]
        print(name, *(m.__file__ for m in own), flush=True)
        os._exit(0)
    os.wait()
"""


def test_what_a_job_imports_is_in_its_digest():
    """Whatever is loaded with a job's module is covered, or changes no figure."""
    names = [f"estr.lab.{name}" for name in MODULES]
    command = [sys.executable, "-W", "ignore", "-c", _LOADED, *names]
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    package = Path(estr.__file__).parent
    for line in found.stdout.splitlines():
        name, *loaded = line.split()
        assert name == names.pop(0)
        assert len(loaded) > 50
        files = set(job_module.code_files(name))
        missing = [f for f in map(Path, loaded) if f not in files and not job_module.is_exempt(f)]
        assert missing == []
        for known in ("config", "options/run", "options/tasks", "metrics", "reducers", "scores"):
            assert package / f"{known}.py" in files
        for known in ("types", "buffer", "chat", "environment", "models", "corrections/estr"):
            assert package / f"{known}.py" in files
        assert package / "builtin" / "model.safetensors" in files
    assert names == []


def test_every_name_in_the_lists_of_code_exists():
    names = {*job_module.BY_NAME, *job_module.EXEMPT}.union(*job_module.MORE_BY_NAME.values())
    assert [name for name in sorted(names) if not (job_module.PACKAGE / name).exists()] == []


@pytest.fixture
def copied(tmp_path, monkeypatch) -> Path:
    """The package's source as digests see it, to be changed."""
    place = tmp_path / "copy" / "estr"
    shutil.copytree(job_module.PACKAGE, place, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(job_module, "PACKAGE", place)
    job_module.code_digest.cache_clear()
    yield place
    job_module.code_digest.cache_clear()


def test_defaults_and_mathematics_change_the_digest_and_comments_do_not(copied):
    def digests() -> list[str]:
        job_module.code_digest.cache_clear()
        return [job_module.code_digest(f"estr.lab.{m}") for m in ("training", "natural", "own")]

    before = digests()
    config = copied / "config.py"
    config.write_text("# a word\n" + config.read_text())
    (copied / "errors.py").write_text("")
    assert digests() == before
    for name in ("config.py", "options/run.py", "scores.py", "reducers.py", "environment.py"):
        file = copied / name
        file.write_text(file.read_text() + "\nNEW = 1\n")
        after = digests()
        assert [a != b for a, b in zip(after, before, strict=True)] == [True] * 3, name
        before = after


def test_an_edit_of_the_source_in_mid_sweep_is_refused(copied, tmp_path):
    text = {"appends": str(copied / "config.py")}
    jobs = [
        job(0, **text, text="# no more than a word\n"),
        job(1, **text, text="NEW = 1\n"),
        job(2),
    ]
    with pytest.raises(ConfigError, match=r"lab_jobs has been changed since .* again"):
        Sweep(tmp_path, processes=1).run(jobs)
    assert made(tmp_path) == ["0", "1"]
    assert len(list((tmp_path / "cache").glob("*.json"))) == 1
    with pytest.raises(ConfigError, match="changed since"):
        Sweep(tmp_path, processes=1).run([job(3)])
    assert made(tmp_path) == ["0", "1"]
