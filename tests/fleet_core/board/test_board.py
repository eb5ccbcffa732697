"""Board profiles, what a machine has, and what the agent decides from both. The machines are made up; no board is at
hand."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import firmware_profiles
from cloud_server.commands.cli import app
from cloud_server.ledger.ledger_tables import Evaluation
from fleet_core.algorithms.methods.registry import METHODS
from fleet_core.base.errors import ConfigError
from fleet_core.board import catalogue, probe
from fleet_core.board import limits as fit
from fleet_core.board import profile as profiles
from fleet_core.board.limits import Limits, Wish
from fleet_core.board.probe import Machine
from fleet_core.board.profile import Can, Profile
from fleet_core.training import local_round
from fleet_core.training.round_plans import capped, cut
from tests.support.inprocess import World, config_text, toy, world
from tests.support.world_checks import finished, statuses

FILES = sorted(firmware_profiles.folder().glob("*.toml"))
WHOLE = 'name = "b"\ntitle = "B"\narch = "aarch64"\n'


def shipped(name: str) -> Profile:
    return catalogue.load(name)


# The files ------------------------------------------------------------------------------------------------------------


def test_the_boards_that_are_promised_are_there() -> None:
    assert list(catalogue.files()) == [
        "jetson-nano", "jetson-orin-nano", "raspberry-pi-3b-plus", "raspberry-pi-4b", "raspberry-pi-5",
        "raspberry-pi-zero-2-w", "x86-64",
    ]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_shipped_profile_reads_and_says_whether_hardware_was_tried(file: Path) -> None:
    board = profiles.load(file)
    assert board.name == file.stem
    assert board.tried != "not said"
    assert board.images
    assert set(board.wheels.pins) <= set(profiles.PACKAGES)


@pytest.mark.parametrize("name", [f.stem for f in FILES if "template" not in f.stem and f.stem != "x86-64"])
def test_boards_are_pinned_below_the_wheels_that_die_on_them(name: str) -> None:
    board = shipped(name)
    pins = board.wheels.pins
    old = any(core in str(board.soc) for core in ("Cortex-A53", "Cortex-A57", "Cortex-A72"))
    assert board.isa == ("armv8.0" if old else "armv8.2")
    assert pins["onnxruntime"] == "1.23.2"
    assert pins.get("torch", "2.9.1") == "2.9.1" if old else pins["torch"] == "2.10.0"
    assert ("torch" in pins) == board.can.train


@pytest.mark.parametrize(("lines", "below"), [
    ('[wheels]\nsource = "s"\npins = { torch = "2.10.0" }\n', "2.10"),
    ('isa = "armv8.2"\n[wheels]\nsource = "s"\npins = { torch = "2.11" }\n', "2.11"),
])
def test_a_torch_that_the_boards_processor_cannot_run_is_refused(tmp_path: Path, lines: str, below: str) -> None:
    assert f"wheels.pins.torch: 2.1{below[-1]}" in mistakes(tmp_path, WHOLE + lines)
    assert f"expected a version below {below}" in mistakes(tmp_path, WHOLE + lines)
    (tmp_path / "b.toml").write_text(WHOLE + lines.replace("2.11", "2.10").replace("2.10.0", "2.9.1"))
    profiles.load(tmp_path / "b.toml")
    (tmp_path / "b.toml").write_text(WHOLE.replace("aarch64", "x86_64") + lines)
    profiles.load(tmp_path / "b.toml")

def test_the_template_shows_every_key_that_a_profile_may_have() -> None:
    text = (firmware_profiles.folder() / "template.toml").read_text()
    every = text.replace("\n# ", "\n")  # what is commented out is read as well
    known_keys: dict[str, Any] = {
        "": Profile, "images": profiles.Image, "wheels": profiles.Wheels, "can": Can, "power": profiles.Power,
        "compute": profiles.Compute, "radio": profiles.Radio,
    }
    for table, cls in known_keys.items():
        for key in (one.name for one in fields(cls)):
            if key not in known_keys and key != "note":
                assert f"\n{key} = " in every, f"{table}.{key}"


# Mistakes -------------------------------------------------------------------------------------------------------------


def mistakes(tmp_path: Path, text: str) -> str:
    file = tmp_path / "board.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as told:
        profiles.load(file)
    return str(told.value)


def test_all_mistakes_of_a_profile_are_reported_at_once_in_order_with_line_key_and_suggestion(tmp_path: Path) -> None:
    message = mistakes(tmp_path, (
        'name = "b"\ntitle = "B"\narch = "aarch65"\nmemory = [512]\n[[images]]\nname = "x"\nfirst_boot = "cloudinit"\n'
        '[wheels]\npins = { troch = "2.9.1" }\nsource = "s"\n[power]\nsensor = "ina32"\nidle_w = 9\nbusy_w = 3\n'
    ))
    lines = [line.replace(f"{tmp_path}/", "") for line in message.splitlines()]
    assert [line.partition(": ")[0] for line in lines] == [
        "board.toml:3", "board.toml:4", "board.toml:7", "board.toml:9", "board.toml:12", "board.toml:13",
        "board.toml:14",
    ]
    for expected in ("did you mean 'aarch64'", "unknown key (did you mean 'memory_mib'", "did you mean 'cloud-init'",
                     "did you mean 'torch'", "did you mean 'ina3221'", "power.idle_w: has no source",
                     "power.busy_w: 3 is below idle_w, 9"):
        assert expected in message


@pytest.mark.parametrize(("lines", "expected"), [
    ("[power]\nidle_w = 1.0\n", "power.idle_w: has no source"),
    ('[power]\nbusy_w = 1.0\nsource = " "\n', "power.busy_w: has no source"),
    ('[power]\nsensor = "pmic"\nscale = 1.1\nsource = "s"\n', "power.scale: has no source: add correction"),
    ("[compute]\neffective_flop_per_s = 1e9\n", "compute.effective_flop_per_s: has no source"),
    ("[radio]\nj_per_byte = 1e-7\n", "radio.j_per_byte: has no source"),
    ('[power]\nidle_w = 1\nbusy_w = 2\nother_watts = [[2, 1]]\nsource = "s"\n', "power.other_watts[0]: is not a pair"),
    ('[power]\nidle_w = 1\nbusy_w = 2\nother_watts = [[2]]\nsource = "s"\n', "power.other_watts[0]: is not a pair"),
    ('[power]\nother_watts = [[1, 2]]\nsource = "s"\n', "power.other_watts: needs idle_w and busy_w"),
    ("[can]\ntrain_batch = 8\n", "can.train_batch: has no source"),
    ('[wheels]\npins = { torch = "2.9.1" }\n', "wheels.pins: has no source"),
])
def test_a_figure_without_a_source_is_refused(tmp_path: Path, lines: str, expected: str) -> None:
    assert expected in mistakes(tmp_path, WHOLE + lines)


@pytest.mark.parametrize(("lines", "expected"), [
    ('sensor = "ina3221"\nrails = ["VDD_IN", "VDD_CPU"]', "power.rails: VDD_IN is the whole board already"),
    ('sensor = "hwmon"', "power.sensor: hwmon needs chip"),
    ('rails = ["VDD_IN"]', 'power.rails: has no effect with sensor = "none"'),
])
def test_a_sensor_that_would_count_wrongly_is_refused(tmp_path: Path, lines: str, expected: str) -> None:
    assert expected in mistakes(tmp_path, f"{WHOLE}[power]\n{lines}\n")


@pytest.mark.parametrize("arch", ["armv7l", "armv6l", "armhf", "i686"])
def test_a_32_bit_system_is_refused_with_the_reason_and_once(tmp_path: Path, arch: str) -> None:
    message = mistakes(tmp_path, WHOLE.replace("aarch64", arch))
    assert message.count("\n") == 0
    assert "board.toml:3: arch: " in message
    assert "32-bit system, for which there is no torch and no onnxruntime wheel" in message


@pytest.mark.parametrize(
    ("arch", "narrow"),
    [("armv7l", True), ("armv6l", True), ("ARMv7l", True), ("arm", True), ("i386", True), ("aarch64", False),
     ("arm64", False), ("x86_64", False)],
)
def test_what_a_kernel_calls_itself_tells_whether_it_has_64_bits(arch: str, narrow: bool) -> None:
    assert profiles.is_narrow(arch) is narrow


@pytest.mark.parametrize("limit", ["80", "0%", "101%", "800 M", "80%\\nUser=root", "-1M"])
def test_a_memory_limit_that_systemd_would_misread_is_refused(tmp_path: Path, limit: str) -> None:
    assert "board.toml:4: memory_max: " in mistakes(tmp_path, f'{WHOLE}memory_max = "{limit}"\n')


# Names and folders ----------------------------------------------------------------------------------------------------


def own_folder(tmp_path: Path, **boards: str) -> Path:
    folder = tmp_path / "own"
    folder.mkdir()
    for name, text in boards.items():
        (folder / f"{name}.toml").write_text(text)
    return folder


def test_a_users_own_board_joins_those_that_ship_and_takes_the_place_of_its_namesake(tmp_path: Path) -> None:
    folder = own_folder(tmp_path, shed=WHOLE.replace('"b"', '"shed"'))
    (folder / "x86-64.toml").write_text('name = "x86-64"\ntitle = "mine"\narch = "x86_64"\n')
    boards = catalogue.all_of(folder)
    assert boards["shed"].title == "B"
    assert boards["x86-64"].title == "mine"
    assert "raspberry-pi-5" in boards


def test_the_folder_may_come_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(catalogue.FOLDER_VARIABLE, str(own_folder(tmp_path, b=WHOLE)))
    assert catalogue.load("b").title == "B"


def test_the_mistakes_of_all_files_in_a_folder_are_reported_at_once(tmp_path: Path) -> None:
    folder = own_folder(tmp_path, one=WHOLE, two="arch = 3\n", three="arch = [\n")
    with pytest.raises(ConfigError) as told:
        catalogue.all_of(folder)
    for expected in ("one.toml:1: name: 'b' is not the file's name (did you mean 'one'?)", "two.toml:1: arch",
                     "two.toml:1: title: missing", "three.toml: is not TOML"):
        assert expected in str(told.value)


def test_an_unknown_board_and_an_invalid_folder_are_refused_with_a_suggestion(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'raspberry-pi-4b'"):
        catalogue.load("rasberry-pi-4b")
    with pytest.raises(ConfigError, match="is not a folder"):
        catalogue.files(tmp_path / "none")


def metafleet(*arguments: str) -> tuple[int, str, BaseException | None]:
    done = CliRunner().invoke(app, list(arguments))
    return done.exit_code, done.stdout, done.exception


def test_the_listing_has_every_board_and_json_has_every_figure_with_what_is_absent(tmp_path: Path) -> None:
    code, text, _ = metafleet("profiles")
    assert code == 0
    assert [line.split()[0] for line in text.splitlines()[1:]] == list(catalogue.files())
    _, text, _ = metafleet("profiles", "--folder", str(own_folder(tmp_path, b=WHOLE)), "--json")
    listed = {board["name"]: board for board in json.loads(text)}
    assert listed["raspberry-pi-4b"]["power"]["idle_w"] == 3.1
    assert listed["raspberry-pi-4b"]["absent"] == {"compute": "no cited effective FLOP/s"}
    assert set(listed["b"]["absent"]) == {"compute", "idle"}
    assert set(listed["raspberry-pi-5"]["absent"]) == {"idle"}, "its sensor sees computing and radio"


def test_one_board_is_shown_with_its_sources(tmp_path: Path) -> None:
    code, text, _ = metafleet("profiles", "show", "raspberry-pi-zero-2-w")
    assert code == 0
    assert "CNX Software" in text
    assert "absent: compute: no cited effective FLOP/s" in text
    folder = own_folder(tmp_path, b=WHOLE)
    for arguments in (("--folder", str(folder), "show", "b"), ("show", "b", "--folder", str(folder)),
                      ("show", str(folder / "b.toml"))):
        code, text, _ = metafleet("profiles", *arguments, "--json")
        assert (code, json.loads(text)["title"]) == (0, "B")
    _, _, error = metafleet("profiles", "show", "jetson")
    assert isinstance(error, ConfigError)


# What a machine has ---------------------------------------------------------------------------------------------------


def test_memory_and_the_boards_own_name_are_read_from_files(tmp_path: Path) -> None:
    """Constructed after proc(5) and the device tree's text property."""
    (tmp_path / "proc/device-tree").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal:         437548 kB\nMemFree:  1 kB\n")
    (tmp_path / "proc/device-tree/model").write_bytes(b"Raspberry Pi Zero 2 W Rev 1.0\0")
    machine = probe.machine(tmp_path)
    assert (machine.memory_mib, machine.model) == (427, "Raspberry Pi Zero 2 W Rev 1.0")
    assert machine.packages["numpy"]
    assert machine.bits in (32, 64)


def test_a_machine_that_says_nothing_is_read_anyway(tmp_path: Path) -> None:
    machine = probe.machine(tmp_path)
    assert machine.model is None
    assert machine.cores >= 1


# The decision ---------------------------------------------------------------------------------------------------------

TORCH = {"torch": "2.9.1", "onnxruntime": "1.23.2"}
ZERO = Machine("aarch64", 64, 4, 437, "2.41", "3.13.1", packages=TORCH)
FOUR = replace(ZERO, memory_mib=1848)


def test_a_board_as_its_profile_says_trains_within_its_limits_and_nothing_is_wrong() -> None:
    board = shipped("raspberry-pi-zero-2-w")
    assert fit.limits(board, ZERO, Wish(engine="torch")) == Limits(True, "", 800_000, 48)
    assert fit.complaints(board, ZERO, Wish()) == ()


def test_more_memory_takes_larger_models_and_batches() -> None:
    board = shipped("raspberry-pi-4b")
    small, large = (fit.limits(board, replace(FOUR, memory_mib=mib), Wish()) for mib in (928, 3796))
    assert small.max_parameters is not None
    assert large.max_parameters is not None
    assert 800_000 < small.max_parameters < large.max_parameters
    assert small.max_batch is not None
    assert large.max_batch is not None
    assert small.max_batch < large.max_batch


def test_the_profiles_limits_come_before_the_rule_and_the_users_before_the_profiles() -> None:
    board = replace(shipped("raspberry-pi-4b"), can=Can(train_parameters=10, train_batch=3, source="s"))
    assert fit.limits(board, FOUR, Wish()) == Limits(True, "", 10, 3)
    assert fit.limits(board, FOUR, Wish(max_parameters=99, max_batch=7)) == Limits(True, "", 99, 7)


def test_a_machine_whose_memory_is_unknown_has_no_limit_from_memory() -> None:
    assert fit.limits(None, replace(FOUR, memory_mib=None), Wish()) == Limits(True)


@pytest.mark.parametrize(("board", "machine", "wish", "why"), [
    ("raspberry-pi-4b", FOUR, Wish(train=False), "device.toml says so"),
    ("raspberry-pi-4b", replace(FOUR, packages={"onnxruntime": "1.23.2"}), Wish(engine="torch"),
     "torch is not installed"),
    ("raspberry-pi-4b", replace(FOUR, packages={"torch": "2.9.1"}), Wish(engine="onnx"),
     "onnxruntime is not installed"),
    ("raspberry-pi-4b", replace(FOUR, memory_mib=390), Wish(engine="torch"), "390 MiB of memory are less than 400"),
    ("raspberry-pi-4b", replace(FOUR, memory_mib=190), Wish(), "190 MiB of memory are less than 200"),
    ("jetson-nano", FOUR, Wish(), "the profile of jetson-nano says that it cannot"),
    (None, replace(FOUR, bits=32), Wish(), "a 32-bit system has neither torch nor onnxruntime"),
    (None, replace(FOUR, arch="armv7l"), Wish(), "has neither torch"),
])
def test_training_is_off_with_its_reason(board: str | None, machine: Machine, wish: Wish, why: str) -> None:
    limits = fit.limits(None if board is None else shipped(board), machine, wish)
    assert not limits.train
    assert why in limits.why
    assert limits.refuses(1) == limits.why


@pytest.mark.parametrize(("machine", "wish", "engines"), [
    (FOUR, "auto", ("torch",)),
    (replace(FOUR, memory_mib=900), "auto", ("torch",)),  # a board with 1 GB
    (replace(FOUR, memory_mib=420), "auto", ("onnx", "torch")),  # torch for a fleet without the graph
    (replace(FOUR, memory_mib=None), "auto", ("torch",)),
    (replace(FOUR, packages={"onnxruntime": "1.23.2"}), "auto", ("onnx",)),
    (replace(FOUR, memory_mib=420), "torch", ("torch",)),
    (FOUR, "onnx", ("onnx",)),
])
def test_auto_takes_onnx_where_torch_is_not_installed_or_the_memory_is_under_1_gb(
    machine: Machine, wish: str, engines: tuple[str, ...]
) -> None:
    assert fit.limits(None, machine, Wish(engine=wish)).engines == engines


def test_a_board_with_little_memory_takes_more_without_torch() -> None:
    small = replace(FOUR, memory_mib=420)
    torch, onnx = (fit.limits(None, small, Wish(engine=engine)) for engine in ("torch", "onnx"))
    assert torch.max_batch is not None
    assert onnx.max_batch is not None
    assert onnx.max_batch > torch.max_batch


def test_a_model_over_the_limit_is_refused_and_one_at_it_is_not() -> None:
    limits = Limits(True, "", 1000)
    assert limits.refuses(1000) == ""
    assert limits.refuses(1001) == "1001 parameters are over this board's 1000"


@pytest.mark.parametrize(("machine", "what"), [
    (replace(FOUR, arch="x86_64"), "architecture"),
    (replace(FOUR, arch="armv7l", bits=32), "architecture"),
    (replace(FOUR, bits=32), "architecture"),
    (replace(FOUR, cores=3), "cores"),
    (replace(FOUR, memory_mib=9000), "memory"),
    (replace(FOUR, memory_mib=500), "memory"),
    (replace(FOUR, glibc="2.27"), "glibc"),
    (replace(FOUR, python="3.6.9"), "Python"),
    (replace(FOUR, packages={**TORCH, "torch": "2.10.0"}), "torch"),
    (replace(FOUR, packages={"torch": "2.9.1"}), "onnxruntime"),
])
def test_what_differs_from_the_profile_is_named_with_a_hint(machine: Machine, what: str) -> None:
    (complaint,) = fit.complaints(shipped("raspberry-pi-4b"), machine, Wish(train=machine.bits == 64))
    assert complaint.what == what
    assert complaint.hint


def test_a_wheels_local_version_is_no_other_version() -> None:
    machine = replace(FOUR, packages={**TORCH, "torch": "2.9.1+cpu"})
    assert fit.complaints(shipped("raspberry-pi-4b"), machine, Wish()) == ()


def test_a_wish_that_the_board_cannot_grant_is_wrong_and_one_not_to_train_is_not() -> None:
    bare = replace(FOUR, packages={"onnxruntime": "1.23.2"})
    assert fit.complaints(shipped("raspberry-pi-4b"), bare, Wish()) == ()
    (complaint,) = fit.complaints(shipped("raspberry-pi-4b"), bare, Wish(engine="torch"))
    assert (complaint.what, complaint.problem) == ("training", "is enabled, but torch is not installed")
    assert "metafleet[train]" in complaint.hint
    assert fit.complaints(shipped("raspberry-pi-4b"), bare, Wish(train=False)) == ()
    (complaint,) = fit.complaints(shipped("raspberry-pi-4b"), FOUR, Wish(threads=8))
    assert complaint.what == "threads"


# What the agent does with it ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_no_batch_of_any_method_is_above_the_boards_limit_and_nothing_else_changes(name: str) -> None:
    hyper = METHODS[name].hyper()
    less = capped(hyper, 3)
    sizes = {key: value for key, value in vars(less).items() if key.endswith("batch") and not isinstance(value, bool)}
    assert sizes
    assert all(1 <= size <= 3 for size in sizes.values())
    assert {k: v for k, v in vars(less).items() if k not in sizes} == {
        k: v for k, v in vars(hyper).items() if k not in sizes}
    assert capped(hyper, None) is hyper
    assert cut(hyper, less) == {key: size for key, size in sizes.items()}
    assert cut(hyper, hyper) == {}
    assert capped(hyper, 10**6) == hyper


def test_support_and_query_keep_their_proportion_under_a_boards_limit() -> None:
    hyper = capped(METHODS["fedmeta-maml"].hyper(support_batch=200, query_batch=800), 100)
    assert (hyper.support_batch, hyper.query_batch) == (25, 100)
    hyper = capped(METHODS["fedmeta-maml"].hyper(support_batch=1, query_batch=800), 100)
    assert (hyper.support_batch, hyper.query_batch) == (1, 100)


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[World]:
    made = world(tmp_path / "w", config_text(rounds=2, devices=2))
    yield made
    made.close()


def test_a_board_too_small_for_the_model_answers_and_does_not_train_and_the_operator_reads_why(fleet: World) -> None:
    fleet.start_server()
    for name, limits in (("d0", None), ("d1", Limits(True)), ("small", Limits(True, "", 10))):
        fleet.start_agent(name, toy(3), limits=limits)
    assert fleet.pump(lambda: finished(fleet))
    devices = {device.name: device for device in fleet.server.ledger.devices()}
    parameters = fleet.agents["small"].service.layout.parameters(("body", "head"))
    assert devices["small"].cannot == f"does not train: {parameters} parameters are over its board's 10"
    assert devices["d1"].cannot is None
    assert {name for n in (1, 2) for name in statuses(fleet, n)} == {"d0", "d1"}
    evaluated = fleet.server.ledger.rows(Evaluation, round=2)
    assert {j.device for j in evaluated} == {"d0", "d1", "small"}


def test_a_trainer_receives_the_boards_batch(fleet: World, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: dict[str, set[int]] = {}
    trained = local_round.train_one

    def noted(*arguments: Any, **keywords: Any) -> Any:
        seen = next(a for a in arguments if hasattr(a, "support_batch"))
        sizes.setdefault(str(seen.support_batch), set()).add(seen.query_batch)
        return trained(*arguments, **keywords)

    monkeypatch.setattr(local_round, "train_one", noted)
    fleet.start_server()
    fleet.start_agent("d0", toy(0), limits=Limits(True, "", None, 4))
    fleet.start_agent("d1", toy(1))
    assert fleet.pump(lambda: finished(fleet))
    assert sizes == {"4": {4}, "50": {50}}
    told = [line for line in fleet.lines if "a smaller batch" in line]
    assert told == ["d0 trains with a smaller batch than the round asks for, its board's limit: support_batch 4, "
                    "query_batch 4"], "once, and in the update's metrics"


def test_the_template_can_be_copied_and_used_as_it_is(tmp_path: Path) -> None:
    folder = own_folder(tmp_path)
    text = (firmware_profiles.folder() / "template.toml").read_text()
    (folder / "mine.toml").write_text(text.replace('name = "template"', 'name = "mine"'))
    assert catalogue.all_of(folder)["mine"].cores == 4
