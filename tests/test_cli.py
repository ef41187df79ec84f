"""The command line: light, helpful, one line and an exit code for every error."""

from __future__ import annotations

import errno
import importlib
import inspect
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest
import torch
from click.testing import CliRunner, Result

import estr
from estr import warmstart
from estr.check import check_recipe
from estr.cli import _Commands, cli
from estr.cli.bench import BENCHMARKS
from estr.cli.options import find_recipe
from estr.config import load_recipe, recipe_from_table
from estr.environment import Environment, Reply, ScriptedEnvironment
from estr.environments.calculator import CalculatorOptions, CalculatorTask
from estr.errors import ConfigError, EngineError, EstrError, Interrupted
from estr.evaluation import evaluate_model
from estr.ledger import shipped_queries
from estr.ledger.parts import part_path
from estr.models import load_model, save_model
from estr.run_folder import RunFolder
from estr.subject import resolve_plays, stamp_version
from ledger_cases import write_random_ledger

COMMANDS = [
    "train",
    "eval",
    "sample",
    "export",
    "ledger",
    "replay",
    "report",
    "check",
    "runs",
    "bench",
    "lab",
    "warmstart",
]


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments])


def error_of(result: Result) -> str:
    """The one error of a command that failed on purpose."""
    assert isinstance(result.exception, SystemExit), result.exception
    assert "Traceback" not in result.stderr
    assert result.stderr.startswith("error: ")
    return result.stderr


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained decoder that speaks the calculator's alphabet."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    torch.manual_seed(0)
    tokenizer = warmstart.make_tokenizer()
    tiny = warmstart.make_model(warmstart.WarmStart(layers=1, width=16), tokenizer)
    save_model(tiny, tokenizer, folder)
    return folder


@pytest.fixture
def runs(model: Path, tmp_path: Path) -> Path:
    """A folder of runs with one in it, "small", that went from version 0 to 9."""
    recipe = recipe_from_table(
        {"name": "small", "model": str(model), "eval": {"problems": 3}, "task": "calculator"}
    )
    folder = RunFolder.create(recipe, tmp_path)
    (folder.path / "summary.json").write_text(json.dumps({"version": 9}))
    for number, place in ((6, folder.model_best), (9, folder.model_last)):
        weights = load_model(model)
        if place == folder.model_best:
            stamp_version(weights, number)
        with torch.no_grad():
            weights.lm_head.weight.mul_(number)
        save_model(weights, warmstart.make_tokenizer(), place)
    return tmp_path


# -- weight and help ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "code",
    [
        "import estr",
        "import estr; estr.load_recipe; estr.Recipe; estr.__version__",
        "from click.testing import CliRunner; from estr.cli import cli;"
        "assert CliRunner().invoke(cli, ['--help']).exit_code == 0",
        "from click.testing import CliRunner; from estr.cli import cli;"
        "assert CliRunner().invoke(cli, ['train', '--help']).exit_code == 0",
    ],
)
def test_help_and_the_package_load_nothing_heavy(code: str) -> None:
    heavy = {"torch", "transformers", "ray", "vllm", "numpy", "rich"}
    script = f"{code}\nimport sys; print(sorted({heavy} & sys.modules.keys()))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_the_commands_are_these() -> None:
    assert sorted(cli.commands) == sorted(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0
    assert "Example" in result.output
    assert f"  estr {command} " in result.output or f"  estr {command}\n" in result.output


def test_the_exported_names_exist_in_any_order() -> None:
    for name in estr.__all__:
        assert getattr(estr, name) is not None
    assert set(estr.__all__) <= set(dir(estr))
    assert estr.__version__ == run("--version").output.split()[-1]
    assert estr.evaluate is evaluate_model
    with pytest.raises(AttributeError, match="has no attribute 'evalute'"):
        _ = estr.evalute


# -- errors -------------------------------------------------------------------------------------


def failing(error: BaseException) -> click.Group:
    """Commands, of which `fail` raises this."""

    @click.group(cls=_Commands)
    @click.option("--debug", is_flag=True)
    def group(debug: bool) -> None:
        pass

    @group.command()
    def fail() -> None:
        raise error

    return group


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("tau is wrong"), 2),
        (Interrupted("stopped after step 3"), 130),
        (KeyboardInterrupt(), 130),
        (EngineError("it broke\nlast lines: \x1b[1m"), 1),
        (EstrError("anything"), 1),
    ],
)
def test_errors_become_a_line_and_an_exit_code(error: BaseException, code: int) -> None:
    group = failing(error)
    result = CliRunner().invoke(group, ["fail"])
    assert (result.exit_code, result.stdout) == (code, "")
    assert result.stderr.startswith("error: ")
    assert "\x1b" not in result.stderr
    debug = CliRunner().invoke(group, ["--debug", "fail"])
    assert (debug.exception is error) == isinstance(error, EstrError)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (IsADirectoryError(errno.EISDIR, "Is a directory", "runs/x"), "runs/x: Is a directory;"),
        (OSError(errno.ENOSPC, "No space left on device"), "error: No space left on device;"),
    ],
)
def test_a_disk_error_becomes_a_line(error: OSError, words: str) -> None:
    group = failing(error)
    result = CliRunner().invoke(group, ["fail"])
    assert result.exit_code == 1
    assert words in result.stderr
    assert CliRunner().invoke(group, ["--debug", "fail"]).exception is error


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["--set", "learnig_rate=1e-6"], "unknown key learnig_rate"),
        (["--set", "trainer.tau=1"], "correction.tau"),
        (["--set", "steps"], "not of the form key=value"),
        (["--set", "sampling.temperature=0"], "temperature"),
        (["no-such-recipe"], "neither a file nor a shipped recipe; shipped are calculator"),
        (["calcualtor"], "shipped recipe; did you mean calculator?"),
        (["recipes/smollm2-gsm8.toml"], "did you mean recipes/smollm2-gsm8k.toml?"),
        (["--resume", "nowhere"], "nowhere"),
    ],
)
def test_a_wrong_recipe_starts_nothing(tmp_path: Path, arguments: list[str], match: str) -> None:
    result = run("train", *arguments, "--runs", tmp_path / "runs")
    assert match in error_of(result)
    assert result.exit_code == 2
    assert not (tmp_path / "runs").exists()


def test_resuming_what_is_not_there_names_it_check_129(tmp_path: Path) -> None:
    result = run("train", "--resume", tmp_path / "nonexistent")
    assert f"{tmp_path / 'nonexistent'}" in error_of(result)
    assert result.exit_code == 2


def test_a_run_without_a_checkpoint_cannot_be_resumed_check_129(runs: Path) -> None:
    result = run("train", "--resume", "small", "--runs", runs)
    assert "no usable checkpoint" in error_of(result)
    assert result.exit_code == 1


def test_resume_and_a_recipe_exclude_each_other(runs: Path) -> None:
    file = runs / "small" / "config.toml"
    result = run("train", file, "--resume", "small", "--runs", runs)
    assert "give either" in error_of(result)


def test_recipes_are_files_or_shipped_names(tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_text("steps = 3\n")
    assert find_recipe(str(file)) == file
    assert find_recipe(None) is None
    shipped = sorted((Path(__file__).parents[1] / "recipes").glob("*.toml"))
    assert len(shipped) > 0
    assert [find_recipe(path.stem) for path in shipped] == shipped


# -- check --------------------------------------------------------------------------------------


def test_check_prints_a_recipe(model: Path) -> None:
    result = run("check", "--set", f"model={model}", "--set", "correction.tau=0.5")
    assert result.exit_code == 0, result.stderr
    assert tomllib.loads(result.stdout) == {
        "model": str(model),
        "correction": {"name": "estr", "tau": 0.5},
    }
    place = result.stdout.index("# every other key has its default; --all prints all values\n")
    assert place < result.stdout.index("# model folder"), "what was set first, then the report"
    notes = [line for line in result.stdout.split("\n") if line.startswith("# ")]
    assert "# gold answers of 8 problems are graded 1" in notes
    assert not [note for note in notes if "empty reply" in note]
    assert "# a turn ends at ']' (token 16) or '.' (token 17) or '<eos>' (token 1)" in notes
    assert f"# model folder {model}" in notes
    assert [n for n in notes if n.startswith("# problem")] == [f"# problem {i}:" for i in range(3)]
    assert "#   wrote | [" in result.stdout
    assert "#   read  | " in result.stdout


def test_check_prints_all_values_on_demand(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_text(f'model = "{model}"\n[trainer]\nlr = 1e-3\n')
    full = run("check", file, "--all", "--set", "steps=3").stdout
    wanted = load_recipe(file, ["steps=3"])
    assert tomllib.loads(full) == tomllib.loads(wanted.to_toml())
    assert "--all" not in full
    assert "# gold answers of 8 problems are graded 1\n" in full
    short = run("check", file, "--set", "steps=3").stdout
    assert tomllib.loads(short) == {"model": str(model), "trainer": {"lr": 1e-3}, "steps": 3}
    assert recipe_from_table(tomllib.loads(short)) == wanted


def test_check_says_whose_problems_it_shows(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "two.toml"
    tasks = "".join(f'[[task]]\nname = "calculator"\nlabel = "{name}"\n' for name in "ab")
    file.write_text(f'model = "{model}"\n{tasks}')
    shown = run("check", file).stdout
    heads = [line for line in shown.split("\n") if line.startswith("# problem")]
    assert heads == [f"# problem {number} of {name}:" for name in "ab" for number in range(3)]
    assert tomllib.loads(shown)["task"][1] == {"name": "calculator", "label": "b"}, "as written"


def test_check_colors_what_is_written_and_so_trained_on(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    lines = run("check", "--set", f"model={model}").stdout.split("\n")
    colors = {"  read  | ": "\x1b[2m", "  wrote | ": "\x1b[1;32m"}
    shown = [(kind, line) for line in lines for kind in colors if kind in line]
    assert len(shown) == 3 * 8  # three problems, four turns each
    for kind, line in shown:
        assert f"{kind}\x1b[0m{colors[kind]}" in line


def test_check_names_every_error_of_a_file_checks_149_and_156(tmp_path: Path) -> None:
    file = tmp_path / "wrong.toml"
    file.write_text(
        'learnig_rate = 1e-6\n[loss]\ntaau = 0.5\n[trainer]\nlr = "fast"\n'
        '[correction]\nname = "icepop"\ntau = 1.0\n'
    )
    result = run("check", file)
    assert result.exit_code == 2
    assert result.stdout == ""
    for place in ("learnig_rate", "loss.taau", "trainer.lr", "tau"):
        assert place in result.stderr
    assert result.stderr.count("error: ") == 4


def test_check_names_every_error_beyond_the_file(tmp_path: Path) -> None:
    overrides = [f"model={tmp_path}/none", "task=chess", "correction=unheard.of:Thing"]
    findings = check_recipe(None, overrides)
    assert len(findings.errors) == 3
    for what in (f"{tmp_path}/none", "chess", "unheard.of"):
        assert any(what in error for error in findings.errors)


def test_check_notes_a_model_that_is_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    findings = check_recipe(None, ["model=Owner/Some-7B"])
    assert findings.errors == []
    assert any("Owner/Some-7B is not on this machine" in note for note in findings.notes)
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    assert len(check_recipe(None, ["model=folder/misspelt"]).errors) == 1


def test_check_names_a_file_that_is_not_toml(tmp_path: Path) -> None:
    file = tmp_path / "torn.toml"
    file.write_text("steps = \n")
    assert [str(file) in error for error in check_recipe(file).errors] == [True]


@pytest.mark.parametrize(
    ("override", "match"),
    [
        ("sampling.max_new_tokens=3", "does not fit"),
        ("sampling.max_tokens=20", "exceeds"),
        ("task.name=test_cli:Disagreeing", "graded 0.0, not 1"),
        ("task.name=test_cli:Broken", "env_error: RuntimeError: no sandbox"),
        ("task.name=test_cli:Empty", "has no problem in its 'test' split"),
        ("task.name=test_cli:Unstoppable", "is 2 tokens"),
    ],
)
def test_check_plays_the_gold_answers_check_101(model: Path, override: str, match: str) -> None:
    result = run("check", "--set", f"model={model}", "--set", override)
    assert result.exit_code == 2
    assert match in result.stderr


def generous(reply: str) -> float:
    return 1.0


def fragile(reply: str, record: dict[str, str]) -> float:
    return float(reply.split()[0] == record["answer"])


def short(replies: list[str]) -> list[float]:
    return [1.0]


@pytest.mark.parametrize(
    ("reward", "note", "error"),
    [
        ("generous", "an empty reply to train problem 0 of task data is graded 1", None),
        ("fragile", r"fails with grader_error: .*IndexError: .* \(test_cli\.py, line \d+\)", None),
        ("short", None, "gave 1 answers for 4 replies"),
    ],
)
def test_check_tries_a_reward_function_on_many_replies_and_on_none(
    model: Path, tmp_path: Path, reward: str, note: str | None, error: str | None
) -> None:
    rows = [json.dumps({"row": f"1{n}+22", "answer": f"[1{n}+22"}) for n in range(9)]
    (tmp_path / "my.jsonl").write_text("\n".join(rows))
    options = {"prompt": "{row}=", "gold": "{answer}", "style": "text", "stop": '["]", "."]'}
    options |= {"path": str(tmp_path / "my.jsonl"), "reward": f"test_cli:{reward}"}
    overrides = [f"task.{key}={value}" for key, value in options.items()]
    findings = check_recipe(None, [f"model={model}", "task.name=data", *overrides])
    assert [e for e in findings.errors if error is None or error not in e] == []
    assert note is None or re.search(note, "\n".join(findings.notes))


@pytest.mark.parametrize("task", ["deep_search", "gsm8k", "math", "test_cli:Talking"])
def test_messages_need_a_chat_template_before_any_compute(
    model: Path, tmp_path: Path, task: str
) -> None:
    setting = ["--set", f"task={task}", "--set", f"model={model}"]
    for command in (
        ["eval", model, "--task", task, "--out", tmp_path / "kept"],
        ["train", "--runs", tmp_path / "runs", *setting],
        ["check", *setting],
    ):
        result = run(*command)
        assert result.exit_code == 2
        assert f"asks in chat messages, and model = {str(model)!r} has no chat" in result.stderr
        assert result.stderr.count("error: ") == 1
        assert "an instruct model" in result.stderr
    assert not (tmp_path / "runs").exists()
    assert list(tmp_path.glob("kept/*.txt")) == []


@pytest.mark.parametrize("task", ["Goldless", "Broken", "Unmade"])
def test_a_task_that_asks_in_text_or_fails_is_let_through(model: Path, task: str) -> None:
    recipe = recipe_from_table({"model": str(model), "task": f"test_cli:{task}"})
    (play,) = resolve_plays(model, recipe, temperature=1.0)
    assert type(play[0]).__name__ == task


def test_what_a_task_prints_is_no_result(model: Path) -> None:
    shown = run("eval", model, "--task", "test_cli:Loud", "--problems", 2, "--json")
    assert json.loads(shown.stdout)["num_problems"] == 2
    assert "on my way" in shown.stderr
    checked = run("check", "--set", f"model={model}", "--set", "task=test_cli:Loud")
    assert tomllib.loads(checked.stdout)["task"] == "test_cli:Loud"
    assert "on my way" in checked.stderr


def test_check_says_that_a_task_has_no_gold_answers(model: Path) -> None:
    findings = check_recipe(None, [f"model={model}", "task.name=test_cli:Goldless"])
    assert findings.errors == []
    assert any("no gold answers" in note for note in findings.notes)
    assert len(findings.shown) == 3
    for trajectory in findings.shown:
        assert trajectory.num_tokens > 0
        assert trajectory.num_sampled_tokens == 0


class Disagreeing(CalculatorTask):
    Options = CalculatorOptions

    def gold(self, split: str, index: int) -> list[str]:
        return ["100"]


class Broken(CalculatorTask):
    def make(self, split: str, index: int) -> ScriptedEnvironment:
        return ScriptedEnvironment("1=", [RuntimeError("no sandbox")])


class Talking(CalculatorTask):
    def make(self, split: str, index: int) -> ScriptedEnvironment:
        return ScriptedEnvironment([{"role": "user", "content": "1+2?"}], [Reply(outcome=1.0)])


class Loud(CalculatorTask):
    def make(self, split: str, index: int) -> Environment:
        print("on my way")
        return super().make(split, index)


class Unmade(CalculatorTask):
    def make(self, split: str, index: int) -> ScriptedEnvironment:
        raise OSError("no sandbox is free")


class Empty(CalculatorTask):
    def size(self, split: str) -> int | None:
        return 0 if split == "test" else None


class Unstoppable(CalculatorTask):
    stop = ("]]",)


class Goldless(CalculatorTask):
    def gold(self, split: str, index: int) -> list[str]:
        return []

    def make(self, split: str, index: int) -> ScriptedEnvironment:
        return ScriptedEnvironment("1=", [Reply(outcome=1.0)])


# -- eval and sample ----------------------------------------------------------------------------


def test_eval_prints_one_object(model: Path) -> None:
    result = run("eval", model, "--task", "calculator", "--problems", 4, "--k", 3, "--json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert (found["task"], found["k"], found["num_problems"]) == ("calculator", 3, 4)
    assert sorted(found["pass_at_k"]) == ["1", "2", "3"]
    assert {"avg_at_k", "intervals", "failures"} <= found.keys()
    same = evaluate_model(model, problems=4, k=3)
    assert found["tokens"] == same.tokens


@pytest.mark.parametrize(
    ("k", "names"), [(1, ["avg@1"]), (3, ["avg@3", "pass@2", "pass@3", "majority@3"])]
)
def test_eval_prints_no_figure_twice(model: Path, k: int, names: list[str]) -> None:
    shown = run("eval", model, "--task", "calculator", "--problems", 2, "--k", k).output
    assert re.findall(r"^\S+@\d+", shown, re.MULTILINE) == names


def test_eval_of_a_run_is_kept_beside_it(runs: Path) -> None:
    shown = run("eval", "small", "--runs", runs)
    assert shown.exit_code == 0, shown.stderr
    assert "3 problems x 1" in shown.output
    assert "version 6" in shown.output
    assert f"{runs / 'small' / 'eval.jsonl'}" in shown.output
    last = run("eval", runs / "small", "--weights", "last", "--json")
    kept = (runs / "small" / "eval.jsonl").read_text().split("\n")
    assert kept[1] == last.stdout.removesuffix("\n")
    assert [json.loads(line)["version"] for line in kept[:2]] == [6, 9]
    start = run("eval", "small", "--weights", "start", "--runs", runs, "--json")
    assert json.loads(start.stdout)["version"] == 0


def test_eval_of_a_run_that_may_not_be_written_to_is_printed(runs: Path) -> None:
    (runs / "small" / "eval.jsonl").mkdir()
    result = run("eval", "small", "--runs", runs, "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["version"] == 6
    assert "eval.jsonl cannot be written: Is a directory; the result is printed" in result.stderr


def test_eval_against_another_prints_both_and_the_difference(runs: Path, model: Path) -> None:
    shown = run("eval", "small", "--against", model, "--k", 2, "--runs", runs)
    assert shown.exit_code == 0, shown.stderr
    for text in ("-- small\n", f"-- {model}\n", "difference", "p-value", "one point", "majority@2"):
        assert text in shown.output
    result = run("eval", "small", "--against", model, "--runs", runs, "--json")
    found = json.loads(result.stdout)
    assert sorted(found) == ["comparison", "first", "second"]
    assert found["comparison"]["num_problems"] == found["second"]["num_problems"] == 3
    assert (runs / "small" / "eval.jsonl").read_text().count("\n") == 2


def test_eval_keeps_rollouts_and_goes_on_from_them(model: Path, tmp_path: Path) -> None:
    arguments = ["eval", model, "--problems", 2, "--out", tmp_path / "kept"]
    first = run(*arguments)
    assert first.exit_code == 0, first.stderr
    assert f"{tmp_path / 'kept'} (rollouts, transcripts)" in first.output
    assert "2 rollouts were there already" in run(*arguments).output
    assert "wrote | " in next((tmp_path / "kept").glob("*.txt")).read_text()


def test_eval_of_nothing_says_what_was_looked_for(tmp_path: Path) -> None:
    result = run("eval", "nowhere", "--runs", tmp_path)
    assert "nowhere is no run" in error_of(result)
    assert result.exit_code == 2


def test_eval_refuses_foreign_keys(model: Path) -> None:
    result = run("eval", model, "--set", "task.num_trems=2")
    assert "num_terms" in error_of(result)
    assert result.exit_code == 2


def test_sample_shows_before_and_after(runs: Path) -> None:
    both = run("sample", "small", "-n", 2, "--runs", runs).output
    assert both.count("read  | ") >= 4
    assert both.index("before: ") < both.index("after: ")
    assert "of version 0" in both
    assert "of version 9" in both
    before = run("sample", "small", "--before", "--runs", runs).output
    after = run("sample", "small", "--after", "--runs", runs).output
    assert "after: " not in before
    assert "before: " not in after
    first = [line for line in both.split("\n") if "read  | " in line and "=" in line]
    assert first[:2] == first[2:4], "the same problems"


def test_sample_of_a_model_has_no_before(model: Path) -> None:
    assert "wrote | " in run("sample", model, "-n", 1).output
    assert "no --before" in error_of(run("sample", model, "--before"))


# -- ledger -------------------------------------------------------------------------------------


@pytest.fixture
def recorded(runs: Path) -> Path:
    """The run "small" with a ledger of three steps."""
    write_random_ledger(runs / "small", steps=3)
    return runs


def test_ledger_lists_what_can_be_asked(recorded: Path) -> None:
    output = run("ledger", "small", "--runs", recorded).output
    for name in ("trained_tokens", "loss_terms", "behavior_entropies", "suspicious-tokens"):
        assert name in output


def test_ledger_prints_a_table_or_json(recorded: Path) -> None:
    sql = "select step, 'a\x1b[1mb' as text, null as none, 1.5 / step as share from settings"
    table = run("ledger", "small", f"{sql} order by step", "--runs", recorded, "--rows", 2).output
    lines = table.splitlines()
    assert lines[0].split() == ["step", "text", "none", "share"]
    assert lines[1].split() == ["1", r"a\x1b[1mb", "-", "1.5"]
    assert lines[-1] == "2 rows (1 more; see --rows)"
    found = run("ledger", "small", f"{sql} order by step", "--runs", recorded, "--json").output
    first = json.loads(found.splitlines()[0])
    assert first == {"step": 1, "text": "a\x1b[1mb", "none": None, "share": 1.5}


@pytest.mark.parametrize("name", shipped_queries())
def test_ledger_answers_every_shipped_query(name: str, recorded: Path) -> None:
    result = run("ledger", "small", name, "--runs", recorded)
    assert result.exit_code == 0, result.output


def test_ledger_json_loses_no_column_and_keeps_numbers(recorded: Path) -> None:
    sql = "select 1 as a, 2 as a, 3 as a_1, 0.25 * count(*) as quarter from settings"
    found = run("ledger", "small", sql, "--runs", recorded, "--json").output
    assert json.loads(found) == {"a": 1, "a_1": 2, "a_1_1": 3, "quarter": 0.75}


def test_ledger_names_a_torn_step_and_a_wrong_query(recorded: Path) -> None:
    part_path(recorded / "small", "tokens", 2).write_bytes(b"PAR1")
    result = run("ledger", "small", "select count(*) from settings", "--runs", recorded)
    assert "2\n1 rows" in result.output
    assert "step 2" in result.stderr
    wrong = run("ledger", "small", "selekt 1", "--runs", recorded)
    assert wrong.exit_code == 1
    assert "\nerror: the query failed: Parser Error" in wrong.stderr
    assert "neither" in error_of(run("ledger", "nowhere", "--runs", recorded))
    near = run("ledger", "small", "maskrate", "--runs", recorded)
    assert "no shipped query maskrate, and a word is no SQL; did you mean mask-rate?" in near.stderr
    assert near.exit_code == 2


# -- bench --------------------------------------------------------------------------------------


def test_bench_names_what_it_knows() -> None:
    message = error_of(run("bench", "warp"))
    assert "'warp'" in message
    assert all(name in message for name in BENCHMARKS)


def test_peers_are_of_one_benchmark_and_must_be_there(tmp_path: Path) -> None:
    assert "not of engine" in error_of(run("bench", "engine", "--peers", tmp_path))
    assert "--ray is of switch, not of engine" in error_of(run("bench", "engine", "--ray"))
    message = error_of(run("bench", "logprobs", "--quick", "--peers", tmp_path))
    assert "conformance/install.py trl" in message


@pytest.mark.parametrize("module", BENCHMARKS.values())
def test_every_benchmark_can_be_run(module: str) -> None:
    signature = inspect.signature(importlib.import_module(module).run)
    assert next(iter(signature.parameters)) == "quick"
