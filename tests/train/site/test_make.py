"""`train all` reuses models, keeps an operator's changes, and keeps the old site on errors."""

from __future__ import annotations

import io
import json
import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from rich.console import Console

from npu_gr.core.errors import ConfigError, DataError
from npu_gr.dataset.build import add, prepare
from npu_gr.dataset.files import read_dataset
from npu_gr.dataset.options import PrepareOptions
from npu_gr.service.config import load
from npu_gr.train.cascade import CascadeChoice, CascadeWay, NextEventCase, choosing_half
from npu_gr.train.metrics import F64
from npu_gr.train.options import list_options
from npu_gr.train.rank.options import LIKE, NEXT
from npu_gr.train.site import make
from npu_gr.train.site.configuration import PRESETS, SiteOptions, options_for
from npu_gr.train.site.like import _code_count
from npu_gr.train.site.parts import PARTS
from npu_gr.train.site.report import Figure, PartReport
from npu_gr.train.site.side_by_side import Training
from npu_gr.train.site.verdict import NextItemTest
from tests.serving import write_checkpoint

OWN_SOURCES = {"shared_encoder": 200, "transitions": 100, "neighbours": 100}
FIGURES = (Figure(name="HR@10 unseen", value=0.2, baseline="Markov counts", baseline_value=0.1),)


class Trainings:
    """In the place of real trainings: writes a folder, and counts."""

    def __init__(self) -> None:
        self.trained: list[str] = []
        self.options: list[SiteOptions] = []  # of each training
        self.before: Callable[[str], None] = lambda _: None  # may fail
        self.chose_over: list[list[str | None]] = []
        self.tested: Sequence[str] = ()  # users who were to choose first
        self.choice: CascadeChoice | None = None

    def side_by_side(
        self, jobs: Sequence[Training[Any]], _threads: int, _show: Any, done: Any
    ) -> None:
        for job in jobs:
            self.before(job.name)
            name, data, options, folder, made_from, start = job.work.args  # type: ignore[attr-defined]
            self.trained.append(name)
            self.options.append(options)
            write_checkpoint(folder, actions=read_dataset(data).action_names)
            (folder / "number").write_text(str(len(self.trained)))
            report = PartReport(
                made_from=made_from,
                version="v",
                measured_on="days",
                num_events=4,
                took_s=1.0,
                figures=FIGURES,
                warning="WARNING: no better" if name == "ranker" else "",
                started_from=start.version if start else "",
                tasks=(NEXT, LIKE) if name == "ranker" else (),
                code_count=options.generate.code_count,
            )
            done(name, report)

    def choose(
        self,
        path: Path,
        overrides: Sequence[str],
        _log: Any,
        sources: Any,
        _users: int,
        tested: Any,
    ) -> CascadeChoice | None:
        self.chose_over.append([load(path, overrides).checkpoint, *sources])
        self.tested = tested
        return self.choice


@pytest.fixture
def trainings(monkeypatch: pytest.MonkeyPatch) -> Trainings:
    found = Trainings()
    monkeypatch.setattr(make, "side_by_side", found.side_by_side)
    monkeypatch.setattr(make, "choose_for_site", found.choose)
    return found


def dataset(folder: Path, num_users: int = 4) -> Path:
    lines = ["user,item,rating,time"]
    lines += [
        f"u'{user},B0{item},{1 + (user + item) % 3},17000000{user}{item}"
        for user in range(num_users)
        for item in range(9)
    ]
    log = folder / "log.csv"
    log.write_text("\n".join([*lines, "u'0,B00,1,1700000999"]) + "\n")
    prepare(log, folder / "site" / "data")
    return folder / "site" / "data"


def run(folder: Path, *overrides: str, **more: Any) -> str:
    text = io.StringIO()
    make.train_site(
        folder / "site" / "data",
        folder / "site",
        overrides,
        2,
        Console(file=text, width=200),
        **more,
    )
    return text.getvalue()


def test_an_action_of_another_name_is_another_model(tmp_path: Path, trainings: Trainings) -> None:
    """The files of events hold the numbers of actions, not their names."""
    for name in ("buy", "purchase"):
        log = tmp_path / name / "log.csv"
        log.parent.mkdir()
        rows = [
            f"u{user},B{item},{name if item % 2 else 'view'},17000000{user}{item}"
            for user in "123"
            for item in range(9)
        ]
        log.write_text("\n".join(["user,item,event,time", *rows]) + "\n")
        prepare(log, tmp_path / name / "data")
        make.train_site(
            tmp_path / name / "data", tmp_path / "site", (), 2, Console(file=io.StringIO())
        )
    assert trainings.trained == [*PARTS, *PARTS]


@pytest.mark.parametrize(
    "wrong", ["rank.refit=false", "retrieve.refit=false", "rank.evaluate_on=validation"]
)
def test_a_site_is_evaluated_and_refitted(tmp_path: Path, trainings: Trainings, wrong: str) -> None:
    dataset(tmp_path)
    with pytest.raises(ConfigError, match=wrong.partition("=")[0]):
        run(tmp_path, wrong)
    assert not trainings.trained


def test_a_site_is_whole(tmp_path: Path, trainings: Trainings) -> None:
    dataset(tmp_path)
    said = run(tmp_path)
    site = tmp_path / "site"
    assert trainings.trained == [*PARTS]
    config = load(site / "serve.yaml")
    assert config.checkpoint == str(site / "ranker")
    assert config.generate is not None
    assert config.generate.checkpoint == str(site / "generator")
    assert config.recommend is not None
    assert config.recommend.popular == str(site / "popular.txt")
    for line in (site / "serve.yaml").read_text().splitlines():
        assert (
            not line
            or line.startswith("#")
            or line.endswith(":")
            or "  # " in line
            or " # " in line
        )
    assert (site / "popular.txt").read_text().splitlines()[0] == "B00"
    report = json.loads((site / "report.json").read_text())
    assert (report["num_events"], report["num_users"], report["num_items"]) == (37, 4, 9)
    page = (site / "README.md").read_text()
    assert f"npu-gr serve --config {site / 'serve.yaml'}" in page
    assert "| ranker | HR@10 unseen | 0.2000 | 0.1000 Markov counts | days |" in page
    assert "0.1000 Markov counts" in said
    assert said.count("WARNING: no better") == page.count("WARNING: no better") == 1
    evaluated = load(site / "evaluated.yaml")
    assert evaluated.checkpoint == str(site / "ranker" / "evaluated")
    assert evaluated.generate is not None
    assert evaluated.generate.catalogue == str(site / "generator" / "evaluated" / "items.jsonl")
    assert evaluated.generate.change_log is None
    serve, curl, _ = make.next_commands(site / "data", site).splitlines()
    assert serve == f"serve with: npu-gr serve --config {site / 'serve.yaml'}"
    assert curl.startswith("curl -s localhost:8080/v1/recommend ")


def test_the_command_that_made_it_is_whole_and_a_shell_reads_it(
    tmp_path: Path, trainings: Trainings
) -> None:
    """All options that decide a site, with values that need quotes, also of two lines."""
    folder = tmp_path / "it's a log"
    folder.mkdir()
    data, site = dataset(folder), folder / "site"
    overrides = ("rank.name=a 'b'\n`c`", "num_matched=50")
    console = Console(file=io.StringIO())
    make.train_site(data, site, overrides, 3, console, "quick")
    want = ["npu-gr", "train", "all", str(data), "--out", str(site), "--preset", "quick"]
    want += ["--set", overrides[0], "--set", overrides[1], "--threads", "3"]
    report = json.loads((site / "report.json").read_text())
    assert shlex.split(report["made_by"]) == want
    page = (site / "README.md").read_text()
    assert f"\n```\n{report['made_by']}\n```\n" in page
    assert f"\nnpu-gr serve --config {shlex.quote(str(site / 'serve.yaml'))}\n" in page
    for name in ("serve.yaml", "evaluated.yaml"):
        assert load(site / name).match is not None
        comments = "\n".join(
            line.removeprefix("# ")
            for line in (site / name).read_text().partition("\n\n")[0].splitlines()
        )
        made_by = (
            comments.partition("Made by: ")[2]
            .partition("\nThe evaluated models")[0]
            .partition("\nServe it: ")[0]
        )
        assert shlex.split(made_by) == want
        assert f"\nServe it: npu-gr serve --config {shlex.quote(str(site / name))}\n" in comments


def test_the_cascade_is_chosen_once_by_the_evaluated_models(
    tmp_path: Path, trainings: Trainings
) -> None:
    log = tmp_path / "log.csv"
    rows = [f"u{user},B{user + at},17000000{user}{at}" for user in range(4) for at in range(9)]
    log.write_text("\n".join(["user,item,time", *rows]))
    prepare(log, tmp_path / "site" / "data")
    run(tmp_path)
    site = tmp_path / "site"
    usual = load(site / "serve.yaml").recommend
    assert usual is not None
    assert (dict(usual.sources), usual.order) == (OWN_SOURCES, "blended")  # too few users to choose
    everything = [*OWN_SOURCES, "history", "generate", "match"]
    assert trainings.chose_over == [[str(site / ".new" / "ranker" / "evaluated"), *everything]]
    run(tmp_path)
    assert len(trainings.chose_over) == 1
    trainings.choice = CascadeChoice(
        CascadeWay(("shared_encoder", "match"), "fused"), [], ["source generate hurts"], 5
    )
    said = run(tmp_path, "num_matched=50")
    assert trainings.chose_over[1][0] == str(site / "ranker" / "evaluated")
    assert "source generate hurts" in said
    for name in ("serve.yaml", "evaluated.yaml"):
        chosen = load(site / name).recommend
        assert chosen is not None
        assert (dict(chosen.sources), chosen.order) == (
            {"shared_encoder": 200, "match": 50},
            "fused",
        )


@pytest.mark.parametrize("is_repeated", [True, False])
def test_repeats_decide_whether_seen_items_are_served(
    tmp_path: Path, trainings: Trainings, is_repeated: bool
) -> None:
    items = "ABCAB" if is_repeated else "ABCDE"
    rows = [
        f"u{user},{item},{1700000000 + at}" for user in range(9) for at, item in enumerate(items)
    ]
    log = tmp_path / "log.csv"
    log.write_text("\n".join(["user,item,time", *rows]))
    prepare(log, tmp_path / "site" / "data")
    run(tmp_path)
    for name in ("serve.yaml", "evaluated.yaml"):
        config = load(tmp_path / "site" / name)
        assert config.recommend is not None
        assert config.generate is not None
        assert config.match is not None
        assert config.recommend.exclude_seen is not is_repeated
        assert config.generate.exclude_seen is not is_repeated
        assert config.match.exclude_seen is not is_repeated
    ratio = "100%" if is_repeated else "0%"
    assert (
        f"{ratio} of the held-out events are repeats"
        in (tmp_path / "site" / "serve.yaml").read_text()
    )


def test_a_site_that_serves_something_else_is_not_put_in_place(
    tmp_path: Path, trainings: Trainings, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = dataset(tmp_path)
    way = CascadeWay(("shared_encoder",), "retrieval")
    trainings.choice = CascadeChoice(way, [], [], 5, hr_of_all=0.7)
    asked: list[Any] = []
    chooses = [
        NextEventCase(
            user=f"c{row}",
            items=[1],
            values=[0.0],
            actions=[0.0],
            timestamps=[1],
            target=2,
            happened_at=2,
        )
        for row in range(40)
    ]
    others = [replace(case, user=f"t{row}") for row, case in enumerate(chooses)]
    monkeypatch.setattr(make, "selection_cases", lambda *_: chooses)
    monkeypatch.setattr(make, "other_cases", lambda *_: others)
    first, last = np.zeros(80), np.full(80, 99.0)
    users = [case.user for case in (*chooses, *others)]
    test = NextItemTest(users=users, ranks={"ranker": first, "Markov counts": last})
    monkeypatch.setattr(NextItemTest, "read", lambda *_, exclude_seen: test)

    def train(found: float) -> str:
        text = io.StringIO()

        def ask(config: Path, overrides: Sequence[str], cases: Sequence[Any]) -> F64:
            recommend = load(config, overrides).recommend
            assert recommend is not None
            asked.append((list(recommend.sources), recommend.order, len(cases)))
            return np.where(np.arange(80) < 40 * found, 0.0, np.inf)

        console = Console(file=text, width=200)
        report = make.train_site(data, tmp_path / "site", (), 2, console, ask=ask)
        assert report.verdict is not None
        return text.getvalue() + report.verdict.text

    with pytest.raises(DataError, match=r"HR@10 0.325 .*, but it was chosen with 0.700"):
        train(0.325)
    assert not (tmp_path / "site" / "serve.yaml").exists()
    said = train(0.7)
    assert asked == [(["shared_encoder"], "retrieval", 80)] * 2
    assert "recommend over HTTP, as configured: HR@10 0.700 of 40 held-out" in said
    assert "(chosen with 0.700)" in said
    # what was served, of the half that did not choose and of the other tested users
    hits = int((~choosing_half(40))[:28].sum())
    assert f"HR@10 {hits / 60:.3f} against 0.000" in said
    assert "for 60 held-out users" in said
    train(0.1)  # nothing changed, so nothing is asked
    assert len(asked) == 2


def test_what_is_made_of_the_same_is_not_made_again(tmp_path: Path, trainings: Trainings) -> None:
    dataset(tmp_path)
    run(tmp_path)
    assert "ranker: reusing version v" in run(tmp_path)
    assert len(trainings.trained) == len(PARTS)
    run(tmp_path, "rank.epochs=3")
    assert trainings.trained[len(PARTS) :] == ["ranker"]
    run(tmp_path, "rank.epochs=3", "max_candidates=50")
    assert len(trainings.trained) == len(PARTS) + 1
    assert load(tmp_path / "site" / "serve.yaml").recommend.max_candidates == 50  # type: ignore[union-attr]
    dataset(tmp_path, 5)
    run(tmp_path, "rank.epochs=3")
    assert len(trainings.trained) == 2 * len(PARTS) + 1


def test_a_model_that_does_not_earn_its_training_is_named_and_left_out(
    tmp_path: Path, trainings: Trainings
) -> None:
    dataset(tmp_path)
    site = tmp_path / "site"
    trainings.choice = CascadeChoice(
        CascadeWay(("shared_encoder", "match"), "fused"), [], [], 5, hr_of_all=0.5
    )
    said = run(tmp_path)
    assert "recommend does not use the generator, whose training took 1 s" in said
    assert "--without generator" in said
    assert "recommend does not use the vectors" not in said
    said = run(tmp_path, "without=[generator]")
    assert trainings.trained == [*PARTS], "nothing is trained again"
    assert f"{site / 'generator'}: no longer trained or served" in said
    assert "recommend does not use the generator" not in said
    assert "generate" not in trainings.chose_over[-1]
    for name in ("serve.yaml", "evaluated.yaml"):
        config = load(site / name)
        assert config.generate is None
        assert config.match is not None
    assert "generator" not in json.loads((site / "report.json").read_text())["parts"]
    assert "`generator/`" not in (site / "README.md").read_text()
    trainings.choice = None
    run(tmp_path, "without=[generator, vectors]", "rank.epochs=3")
    assert trainings.trained[len(PARTS) :] == ["ranker"]
    assert load(site / "serve.yaml").match is None
    run(tmp_path, "rank.epochs=3")
    assert trainings.trained[len(PARTS) + 1 :] == ["generator", "vectors"]


def test_what_an_interrupted_run_made_of_a_model_is_dropped_with_it(
    tmp_path: Path, trainings: Trainings
) -> None:
    dataset(tmp_path)

    def fail(name: str) -> None:
        if name != "generator":
            raise DataError("no disk")

    trainings.before = fail
    with pytest.raises(DataError, match="no disk"):
        run(tmp_path)
    trainings.before = lambda _: None
    run(tmp_path, "without=[generator]")
    assert not (tmp_path / "site" / "generator").exists()


def test_a_failure_leaves_the_old_site_and_what_was_finished(
    tmp_path: Path, trainings: Trainings
) -> None:
    dataset(tmp_path)
    run(tmp_path)
    old = {path: path.read_bytes() for path in (tmp_path / "site").rglob("*") if path.is_file()}
    last = [*PARTS][-1]

    def fail(name: str) -> None:
        if name == last:
            raise DataError("no disk")

    trainings.before = fail
    with pytest.raises(DataError, match="no disk"):
        run(tmp_path, "rank.seed=1", "generate.seed=1", "retrieve.seed=1")
    now = {path: path.read_bytes() for path in old if path.exists()}
    assert now == old
    trainings.before = lambda _: None
    trainings.trained.clear()
    run(tmp_path, "rank.seed=1", "generate.seed=1", "retrieve.seed=1")
    assert last in trainings.trained
    assert "generator" not in trainings.trained  # the failed run had finished it


def test_a_configuration_that_somebody_changed_stays(tmp_path: Path, trainings: Trainings) -> None:
    dataset(tmp_path)
    run(tmp_path)
    serve = tmp_path / "site" / "serve.yaml"
    changed = serve.read_text().replace("port: 8080", "port: 9090")
    serve.write_text(changed)
    for _ in range(2):
        said = " ".join(run(tmp_path, "max_candidates=50").split())
        assert "has changes that were not made by this command" in said
        assert serve.read_text() == changed
    assert (
        yaml.safe_load((tmp_path / "site" / "serve.new.yaml").read_text())["recommend"][
            "max_candidates"
        ]
        == 50
    )
    serve.unlink()
    run(tmp_path)
    assert load(serve).server.port == 8080


def test_a_dataset_that_changes_meanwhile_is_rejected(tmp_path: Path, trainings: Trainings) -> None:
    dataset(tmp_path)
    sizes = iter([5, 6, 7])

    def change(_: str) -> None:
        dataset(tmp_path, next(sizes))

    trainings.before = change
    with pytest.raises(DataError, match="was changed during the training"):
        run(tmp_path)
    assert not (tmp_path / "site" / "serve.yaml").exists()
    trainings.before = lambda _: None
    trainings.trained.clear()
    dataset(tmp_path)  # as the first run found it; but who knows what its models were trained on
    run(tmp_path)
    assert trainings.trained == [*PARTS]


def test_what_is_wrong_is_said_before_anything_is_trained(
    tmp_path: Path, trainings: Trainings
) -> None:
    with pytest.raises(DataError, match="no dataset; npu-gr prepare LOG --out"):
        run(tmp_path)
    dataset(tmp_path)
    with pytest.raises(ConfigError, match=r"unknown key rank.epoch; did you mean epochs\?"):
        run(tmp_path, "rank.epoch=3")
    with pytest.raises(
        ConfigError, match=r"has \d+ events, and train all holds at most 9 in memory"
    ):
        run(tmp_path, "rank.memory_events=9")
    assert trainings.trained == []


@pytest.mark.parametrize(
    ("num_items", "codes"), [(1682, (64, 64)), (2049, (128, 128)), (10**6, (256, 256, 256))]
)
def test_there_are_enough_semantic_ids(num_items: int, codes: tuple[int, ...]) -> None:
    assert options_for(num_items).generate.code_count == codes


@pytest.mark.parametrize(
    ("num_events", "num_users", "epochs", "tested"),
    [
        (100_000, 943, (16, 20), 1000),
        (198_502, 22_363, (16, 20), 2236),
        (1_000_000, 100_000, (5, 5), 3000),
        (10**8, 10**7, (2, 2), 3000),
    ],
)
def test_a_long_log_takes_fewer_epochs_and_more_test_users(
    num_events: int, num_users: int, epochs: tuple[int, int], tested: int
) -> None:
    found = options_for(1000, PRESETS["full"], num_events, num_users)
    assert (found.rank.epochs, found.generate.epochs) == epochs
    assert found.generate.validate_every <= found.generate.epochs
    # the same for all, so that the baselines are fitted once
    assert {one.test_users for one in (found.rank, found.generate, found.retrieve)} == {tested}


def test_options_of_every_model_are_listed_in_their_sections() -> None:
    lines = [line.split() for line in list_options(PRESETS).splitlines()]
    keys = {words[0].partition("=")[0]: words[1:] for words in lines[1:]}
    for section in ("rank", "generate", "retrieve"):
        assert keys[f"{section}.seed"]
        assert section not in keys
    assert keys["num_popular"][:3] == ["popular", "items", "to"]


def test_a_site_like_another_keeps_its_tasks_and_its_actions(
    tmp_path: Path, trainings: Trainings
) -> None:
    dataset(tmp_path)
    run(tmp_path)
    day = tmp_path / "day"
    day.mkdir()
    rows = [f"v{user},C{item},{1 + item % 3},18000000{item}" for user in "ab" for item in range(9)]
    (day / "log.csv").write_text("\n".join(["user,item,rating,time", *rows]))
    like = PrepareOptions(like=str(tmp_path / "site" / "data"))
    prepare(day / "log.csv", day / "site" / "data", like)
    run(day, like=tmp_path / "site")
    assert {one.rank.tasks for one in trainings.options[3:]} == {(NEXT, LIKE)}
    assert f"--like {tmp_path / 'site'}" in (day / "site" / "README.md").read_text()
    # of other ratings, the actions would get other numbers
    (day / "log.csv").write_text("\n".join(["user,item,rating,time", "a,B,0,1800000000", *rows]))
    prepare(day / "log.csv", day / "site" / "data", like)
    with pytest.raises(ConfigError, match=r"has other actions: action 0 is '1' there.*--like"):
        run(day, like=tmp_path / "site")
    prepare(tmp_path / "log.csv", tmp_path / "other" / "site" / "data")
    assert run(tmp_path / "other", like=tmp_path / "site")
    with pytest.raises(ConfigError, match="no site of `npu-gr train all`"):
        run(day, like=tmp_path / "none")


@pytest.mark.parametrize(
    ("was", "num_items", "want"),
    [
        ((64, 64), 500, (64, 64)),
        ((64, 64), 3000, (128, 128)),  # room is left to few, but the levels stay
        ((256, 256), 60_000, (256, 256)),  # full, but the levels stay
        ((256, 256), 70_000, (256, 256, 256)),
        ((256, 256, 256), 500, (256, 256, 256)),
        ((), 500, (64, 64)),  # an older version has not said it
    ],
)
def test_the_levels_of_codes_stay_as_long_as_they_can(
    was: tuple[int, ...], num_items: int, want: tuple[int, ...]
) -> None:
    chosen = options_for(num_items).generate.code_count
    assert _code_count(was, chosen, num_items) == want


def test_models_that_are_trained_on_are_not_those_of_train_all(
    tmp_path: Path, trainings: Trainings
) -> None:
    data = dataset(tmp_path)
    run(tmp_path)
    (tmp_path / "day.csv").write_text("user,item,rating,time\nu'0,B08,2,1800000001\n")
    add(tmp_path / "day.csv", data)
    text = run(tmp_path, like=tmp_path / "site", trains_on=True)
    assert "ranker: version v, trained on from v, in 1 s" in text
    assert "vectors: version v, in 1 s" in text
    run(tmp_path, like=tmp_path / "site", trains_on=True)
    assert len(trainings.trained) == 6, "of the same events nothing is trained on"
    text = run(tmp_path)
    assert trainings.trained[6:] == ["generator", "ranker"]
    assert "trained on from" not in text


def test_users_whom_the_baselines_ranked_are_to_choose(
    tmp_path: Path, trainings: Trainings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a log of many users, few others would have ranks of baselines to be compared with."""
    test = NextItemTest(users=["u'3"], ranks={})
    monkeypatch.setattr(NextItemTest, "read", lambda *_, exclude_seen: test)
    dataset(tmp_path)
    run(tmp_path)
    assert trainings.tested == ["u'3"]
