"""Plans as documents: what comes back is what was written, the same everywhere, and nothing else is believed."""

from __future__ import annotations

import errno
import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from memfit.errors import InputError
from memfit.plans import Plan, ShardedUnit, ShardPlan, load
from memfit.plans.schema import SCHEMA_FILE, schema_text
from tests.plans import plan_cases

Document = dict[str, Any]


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_cases.usual_plan()


def test_round_trip(plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan.save(path)
    assert load(path) == plan
    assert Plan.from_json(plan.to_json()) == plan
    assert Plan.from_json(plan.to_json()).to_json() == plan.to_json()
    assert list(tmp_path.iterdir()) == [path], "no temporary file is left"


def test_sharded_and_infeasible_plans_round_trip(tmp_path: Path) -> None:
    case = plan_cases.Case.of(plan_cases.captured())
    units = (
        ShardedUnit(module="", reshard_after_forward=False),
        ShardedUnit(module="layers.0", reshard_after_forward=True),
    )
    shard = ShardPlan(ranks=1, units=units, prefetch=1, param_dtype="bfloat16", reduce_dtype="float32")
    for number, plan in enumerate((case.plan(case.chosen("layers.0"), shard=shard), case.infeasible())):
        plan.save(tmp_path / f"{number}.json")
        assert load(tmp_path / f"{number}.json") == plan


def test_another_process_writes_the_same_bytes(plan: Plan) -> None:
    script = Path(plan_cases.__file__)
    environment = {**os.environ, "PYTHONHASHSEED": "7", "OMP_NUM_THREADS": "1"}
    written = subprocess.run([sys.executable, str(script)], env=environment, cwd="/", capture_output=True, check=True)
    assert written.stdout == plan.to_json().encode()


def test_document_has_no_paths_of_this_machine(plan: Plan) -> None:
    assert str(Path(__file__).parent) not in plan.to_json()
    assert "plan_cases.py" not in plan.to_json()


def test_order_of_categories_does_not_show(plan: Plan) -> None:
    document = json.loads(plan.to_json())
    categories = document["baseline"]["peak_by_category"]
    document["baseline"]["peak_by_category"] = dict(reversed(categories.items()))
    assert Plan.from_json(json.dumps(document)).to_json() == plan.to_json()


def test_a_failed_save_leaves_the_old_file(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    path.write_text("old")

    def full_disk(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full_disk)
    with pytest.raises(InputError, match=r"plan\.json cannot be written: No space left on device"):
        plan.save(path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_saved_plans_can_be_read_by_whom_the_umask_lets(plan: Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    (tmp_path / "other").touch()
    modes = {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert len(modes) == 1


def test_saving_into_no_folder_is_refused(plan: Plan, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no folder"):
        plan.save(tmp_path / "nowhere" / "plan.json")


@pytest.mark.parametrize("cut", [0, 1, 400, -3])
def test_truncated_files_are_refused(plan: Plan, tmp_path: Path, cut: int) -> None:
    path = tmp_path / "plan.json"
    path.write_text(plan.to_json()[:cut])
    with pytest.raises(InputError, match=r"plan\.json is not JSON: .*Plan\.save"):
        load(path)


@pytest.mark.parametrize(
    "content",
    [b"\xff\xfe", b"PK\x03\x04", b'{"a": ' + b"[" * 100_000, b'{"schema": 1, "fingerprint": "\xff"}'],
    ids=["text", "archive", "deep", "encoding"],
)
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"is not (JSON|a memfit plan)"):
        load(path)


@pytest.mark.parametrize("content", ["[]", "3", "{}", '{"schema": "one", "fingerprint": ""}', '{"schema": 1}'])
def test_other_documents_are_refused(content: str) -> None:
    with pytest.raises(InputError, match="the document is not a memfit plan"):
        Plan.from_json(content)


def test_other_schemas_are_refused(plan: Plan) -> None:
    with pytest.raises(InputError, match="has plan schema 2, this memfit reads 1; plan the step again"):
        Plan.from_json(plan.to_json().replace('"schema": 1', '"schema": 2'))


def entry(document: Document) -> Document:
    return document["checkpoint"][0]


def save_an_op_twice(document: Document) -> None:
    entry(document)["saved_ops"] = [entry(document)["recomputed_ops"][1]]


def forget_an_op(document: Document) -> None:
    del entry(document)["recomputed_ops"][1]


def turn_ops_around(document: Document) -> None:
    entry(document)["recomputed_ops"].reverse()


def save_beyond_the_unit(document: Document) -> None:
    entry(document)["saved_ops"] = [[1000, "aten.mm.default", 0]]


def stop_early(document: Document) -> None:
    entry(document)["stop"] -= 1


def checkpoint_inside(document: Document) -> None:
    inner = {**entry(document), "unit": "layers.0.up", "module": "layers.0.up"}
    document["checkpoint"].insert(1, inner)


def checkpoint_twice(document: Document) -> None:
    document["checkpoint"][1].update(unit="layers.0", module="layers.0")


def shard_of(**changes: object) -> Callable[[Document], None]:
    def change(document: Document) -> None:
        units = [{"module": "layers.0", "reshard_after_forward": True}]
        document["shard"] = {"ranks": 1, "units": units, "prefetch": 1, **changes}

    return change


def put(path: str, value: object) -> Callable[[Document], None]:
    def change(document: Document) -> None:
        *outer, last = [int(part) if part.isdecimal() else part for part in path.split("/")]
        inside: Any = document
        for part in outer:
            inside = inside[part]
        inside[last] = value

    return change


AT = {"op": 0, "name": "aten.mm.default", "phase": "forward", "module": ""}
DAMAGE: list[tuple[Callable[[Document], None], str]] = [
    (put("status", "great"), r"not a valid plan: Invalid enum value 'great' - at `\$\.status`"),
    (put("budget_bytes", -1), r"not a valid plan: .* at `\$\.budget_bytes`"),
    (put("budget_bytes", "72GiB"), r"not a valid plan: Expected `int`, got `str` - at `\$\.budget_bytes`"),
    (put("baseline/peak_bytes", -5), r"not a valid plan: .* at `\$\.baseline\.peak_bytes`"),
    (put("baseline/peak_by_category", {"snacks": 5}), r"not a valid plan: Invalid enum value 'snacks'"),
    (put("fingerprint", "abc"), r"not a valid plan: .* at `\$\.fingerprint`"),
    (put("checkpoint/0/discarded_bytes", -5), r"not a valid plan: .* at `\$\.checkpoint\[0\]\.discarded_bytes`"),
    (put("checkpoint/0/discard_ratio", 1.5), r"not a valid plan: .* at `\$\.checkpoint\[0\]\.discard_ratio`"),
    (put("checkpoint/0/saved_ops", [[1]]), r"not a valid plan: .* at `\$\.checkpoint\[0\]\.saved_ops\[0\]`"),
    (put("checkpont", []), "not a valid plan: Object contains unknown field `checkpont`"),
    (put("trace/parameters/0/2", 7), r"not a valid plan: .* at `\$\.trace\.parameters\[0\]\[2\]`"),
    (lambda document: document.pop("target"), "not a valid plan: Object missing required field `target`"),
    (put("status", "infeasible"), "inconsistent: status is infeasible, and 4 units are checkpointed"),
    (put("predicted", None), "inconsistent: status is optimal, and predicted is missing"),
    (put("gap", None), "inconsistent: status is optimal, and gap is missing"),
    (put("bound_ms", 1e9), "inconsistent: bound_ms 1000000000.0 is above predicted.step_ms"),
    (put("budget_bytes", 1000), "inconsistent: predicted.peak_bytes .* is above budget_bytes 1000"),
    (put("minimum_budget_bytes", 10**12), "inconsistent: minimum_budget_bytes 1000000000000 is above budget_bytes"),
    (put("baseline/peak_bytes", 5), "inconsistent: baseline.peak_by_category adds up to"),
    (put("checkpoint/0/recompute_ms", 40.0), "inconsistent: predicted.recompute_ms is .* adds up to 40"),
    (put("checkpoint/0/end", 10**6), "inconsistent: unit 'layers.0' is ops 0 up to 1000000 of a step of"),
    (
        put("target/device", "l4"),
        "inconsistent: target.device is 'l4', and the step was",
    ),
    (put("checkpoint/0/unit", "layers.9"), "inconsistent: unit 'layers.9' is a call of the module 'layers.0'"),
    (checkpoint_twice, "inconsistent: unit 'layers.0' is checkpointed twice"),
    (put("trace/parameters/0/0", ["head.weight"]), "inconsistent: parameter head.weight is there twice"),
    (save_an_op_twice, "inconsistent: op 1 of unit 'layers.0' is in saved_ops and in recomputed_ops"),
    (forget_an_op, "inconsistent: op 1 of unit 'layers.0' is neither in saved_ops nor in recomputed_ops"),
    (turn_ops_around, "inconsistent: recomputed_ops of unit 'layers.0' are not in the order of their offsets"),
    (save_beyond_the_unit, "inconsistent: op 1000 of unit 'layers.0' is beyond its 7 ops"),
    (put("blocker", {"peak_bytes": 5, "peak_by_category": {}, "peak_at": AT}), "inconsistent: .*blocker"),
    (stop_early, "inconsistent: op 4 of unit 'layers.0' runs again, and the second run stops at 3"),
    (checkpoint_inside, "inconsistent: units 'layers.0' and 'layers.0.up' have ops in common"),
    (lambda document: document["checkpoint"].reverse(), "inconsistent: checkpoint is not in the order"),
    (put("ranks", 2), "inconsistent: ranks is 2, and there is no shard"),
    (shard_of(ranks=3), "inconsistent: shard.ranks is 3, which does not divide 1 ranks"),
    (shard_of(units=[]), "inconsistent: shard has no units"),
    (shard_of(units=[{"module": "a", "reshard_after_forward": True}] * 2), "inconsistent: module 'a' is sharded twice"),
    (shard_of(prefetch=-1), r"not a valid plan: .* at `\$\.shard\.prefetch`"),
    (shard_of(param_dtype="int7"), r"not a valid plan: Invalid enum value 'int7' - at `\$\.shard\.param_dtype`"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGE, ids=[message[:60] for _, message in DAMAGE])
def test_damage_is_refused_with_what_is_wrong(
    plan: Plan, tmp_path: Path, damage: Callable[[Document], None], message: str
) -> None:
    document = json.loads(plan.to_json())
    damage(document)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(document))
    with pytest.raises(InputError, match=rf"plan\.json is {message}.*; plan the step again"):
        load(path)


@pytest.mark.parametrize(
    ("name", "value"),
    [("gap", 0.0), ("bound_ms", 1.0), ("shard", {"ranks": 1, "units": [], "prefetch": 0}), ("minimum_budget_bytes", 5)],
)
def test_an_infeasible_plan_has_no_answer(name: str, value: object) -> None:
    plan = plan_cases.Case.of(plan_cases.captured()).infeasible()
    document = {**json.loads(plan.to_json()), name: value}
    with pytest.raises(InputError, match=f"inconsistent: status is infeasible.*{name}"):
        Plan.from_json(json.dumps(document))


def test_levers_of_an_older_document_are_refused_by_name() -> None:
    document = json.loads(plan_cases.Case.of(plan_cases.captured()).infeasible().to_json())
    document["blocker"]["levers"] = []
    with pytest.raises(InputError, match=r"unknown field `levers` - at `\$\.blocker`; plan the step again"):
        Plan.from_json(json.dumps(document))


def test_what_fills_the_blocker_adds_up() -> None:
    document = json.loads(plan_cases.Case.of(plan_cases.captured()).infeasible().to_json())
    document["blocker"]["peak_bytes"] += 1
    with pytest.raises(InputError, match=r"inconsistent: blocker\.peak_by_category adds up to"):
        Plan.from_json(json.dumps(document))


def test_shipped_schema_is_what_the_types_say() -> None:
    assert SCHEMA_FILE.read_text() == schema_text(), "run python -m memfit.plans.schema"


def test_schema_names_every_field(plan: Plan) -> None:
    definitions = json.loads(SCHEMA_FILE.read_text())["$defs"]
    own = {"mesh", "rank", "wrappers", "collectives"}  # only plans of a step that was captured on a mesh have them
    own |= {"offload_link"}  # and this, and those of a unit, only plans that offload
    own |= {"chunked_loss", "micro_batch", "decisions", "price_ms_per_gib"}  # and these only plans that decide more
    offload = {"offload", "offload_next", "offloaded_bytes", "exposed_ms"}
    assert set(definitions["Plan"]["properties"]) == set(json.loads(plan.to_json())) | own
    numbers = {"numbers"}  # only units that save ops after their second run has ended have these
    assert set(definitions["Checkpoint"]["properties"]) == set(entry(json.loads(plan.to_json()))) | offload | numbers


def test_a_saved_op_cannot_be_deleted_behind_the_second_run(tmp_path: Path) -> None:
    case = plan_cases.Case.of(plan_cases.captured(rows=4096))
    found = [
        (unit, policy)
        for unit in case.frontiers.units
        for policy in case.frontiers[unit.name].policies
        if 0 <= policy.stop < max(policy.saved, default=-1)
    ]
    document = json.loads(case.plan(found[:1]).to_json())
    unit = document["checkpoint"][0]
    assert unit["saved_ops"][-1][0] > unit["stop"]
    unit["saved_ops"].pop()
    (tmp_path / "plan.json").write_text(json.dumps(document))
    with pytest.raises(InputError, match=r"saves \d+ ops after its stop, and numbers \d+ of them"):
        load(tmp_path / "plan.json")
    unit["numbers"].pop()
    (tmp_path / "plan.json").write_text(json.dumps(document))
    with pytest.raises(InputError, match=r"keeps \d+ bytes \(cached_bytes\), and its saved_ops have only"):
        load(tmp_path / "plan.json")


@pytest.mark.parametrize("path", [None, 3, ""])
def test_a_path_is_a_path(plan: Plan, path: Any) -> None:
    with pytest.raises(InputError, match=r"save takes the path of a file.*write save\('plan.json'\)"):
        plan.save(path)
    with pytest.raises(InputError, match="load takes the path of a file"):
        load(path)


def test_folders_and_missing_files_are_refused(plan: Plan, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"is a folder; give the path of a file in it, such as .*plan\.json"):
        plan.save(tmp_path)
    with pytest.raises(InputError, match="is a folder"):
        load(tmp_path)
    with pytest.raises(InputError, match=r"there is no file .*nope\.json"):
        load(tmp_path / "nope.json")
    assert list(tmp_path.iterdir()) == []


def test_absurd_numbers_are_refused_without_counting_to_them(plan: Plan) -> None:
    entry = msgspec.structs.replace(plan.checkpoint[0], end=10**12, stop=10**11)
    trace = msgspec.structs.replace(plan.trace, ops=10**13)
    absurd = msgspec.structs.replace(plan, checkpoint=(entry,), trace=trace)
    with pytest.raises(InputError, match="neither in saved_ops nor in recomputed_ops"):
        Plan.from_json(absurd.to_json())
