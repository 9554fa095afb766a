from __future__ import annotations

from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forge.errors import ConfigError
from forge.placement import MeshConfig, Placement, RoleConfig, detect_device, plan_placement


def plan(
    cfg: MeshConfig,
    device: Literal["cpu", "cuda"] = "cuda",
    slots: int = 8,
    torchrun_slots: int | None = None,
    roles: tuple[str, ...] = ("trainer", "generator"),
    num_hosts: int = 1,
    device_names: list[str] | None = None,
) -> Placement:
    return plan_placement(
        cfg,
        device=device,
        slots=slots,
        torchrun_slots=torchrun_slots,
        roles=roles,
        num_hosts=num_hosts,
        device_names=device_names,
    )


def devices(placement: Placement, role: str) -> list[tuple[int, ...]]:
    return [replica.devices for replica in placement.roles[role].replicas]


def test_on_cuda_roles_of_one_pool_get_consecutive_devices_in_the_order_of_the_roles() -> None:
    placement = plan(MeshConfig(trainer=RoleConfig(procs=4), generator=RoleConfig(procs=2, replicas=2)))
    assert devices(placement, "trainer") == [(0, 1, 2, 3)]
    assert devices(placement, "generator") == [(4, 5), (6, 7)]
    assert [replica.name for replica in placement.roles["generator"].replicas] == [
        "generator_0",
        "generator_1",
    ]


def test_each_trainer_rank_sees_its_own_gpu_and_a_generator_sees_all_of_its_replica() -> None:
    placement = plan(MeshConfig(trainer=RoleConfig(procs=2, threads=3), generator=RoleConfig(procs=2, replicas=2)))
    trainer = placement.replica("trainer", 0)
    assert [env["CUDA_VISIBLE_DEVICES"] for env in trainer.envs] == ["0", "1"]
    assert [env["OMP_NUM_THREADS"] for env in trainer.envs] == ["3", "3"]
    assert trainer.processes_per_host == 2
    second = placement.replica("generator", 1)
    assert [env["CUDA_VISIBLE_DEVICES"] for env in second.envs] == ["4,5"]
    assert second.processes_per_host == 1
    assert placement.roles["generator"].procs == 2


def test_device_names_of_the_environment_are_kept() -> None:
    placement = plan(MeshConfig(), slots=2, device_names=["GPU-a", "MIG-b"])
    assert placement.replica("trainer", 0).envs[0]["CUDA_VISIBLE_DEVICES"] == "GPU-a"
    assert placement.replica("generator", 0).envs[0]["CUDA_VISIBLE_DEVICES"] == "MIG-b"


def test_a_role_without_slots_sees_no_gpu() -> None:
    assert plan(MeshConfig()).replica("judge", 0).envs[0]["CUDA_VISIBLE_DEVICES"] == ""
    assert "CUDA_VISIBLE_DEVICES" not in plan(MeshConfig(), "cpu").replica("judge", 0).envs[0]


def test_a_role_that_the_plan_does_not_know_is_one_process_without_a_device() -> None:
    placement = plan(MeshConfig())
    judge, other = placement.replica("judge", 0), placement.replica("judge", 1)
    assert (judge.name, other.name) == ("judge", "judge_1")
    assert (judge.devices, judge.first_host, judge.processes_per_host) == ((), 0, 1)


def test_pools_apart_start_where_the_pool_before_ends() -> None:
    cfg = MeshConfig(
        pools={"train": 4, "rollout": 4},
        trainer=RoleConfig(procs=2, pool="train"),
        generator=RoleConfig(procs=1, replicas=4, pool="rollout"),
    )
    placement = plan(cfg)
    assert devices(placement, "trainer") == [(0, 1)]
    assert devices(placement, "generator") == [(4,), (5,), (6,), (7,)]


def test_two_roles_may_share_a_pool_but_no_device() -> None:
    cfg = MeshConfig(
        pools={"train": 4, "other": 4},
        trainer=RoleConfig(procs=4, pool="train"),
        generator=RoleConfig(procs=2, pool="other"),
        reference=RoleConfig(procs=2, pool="other"),
    )
    placement = plan(cfg, roles=("trainer", "generator", "reference"))
    assert devices(placement, "generator") == [(4, 5)]
    assert devices(placement, "reference") == [(6, 7)]


def test_on_cpu_only_the_trainer_takes_slots() -> None:
    placement = plan(MeshConfig(generator=RoleConfig(replicas=3)), "cpu", slots=1)
    assert devices(placement, "trainer") == [(0,)]
    assert devices(placement, "generator") == [(), (), ()]
    assert placement.replica("generator", 2).envs == ({"OMP_NUM_THREADS": "1"},)


def test_on_cpu_under_torchrun_the_trainer_takes_every_slot_unless_told_otherwise() -> None:
    assert plan(MeshConfig(), "cpu", slots=2, torchrun_slots=2).roles["trainer"].procs == 2
    one = MeshConfig(trainer=RoleConfig(procs=1))
    assert plan(one, "cpu", slots=2, torchrun_slots=2).roles["trainer"].procs == 1


def test_under_plain_python_the_trainer_is_one_rank() -> None:
    assert plan(MeshConfig(), "cpu", slots=16).roles["trainer"].procs == 1


def test_debug_is_one_rank_under_torchrun_too() -> None:
    assert plan(MeshConfig(debug=True), "cpu", slots=2, torchrun_slots=2).roles["trainer"].procs == 1


def test_on_several_nodes_a_trainer_fills_the_nodes_in_order() -> None:
    placement = plan(MeshConfig(trainer=RoleConfig(procs=8)), slots=4, num_hosts=3)
    trainer, generator = placement.replica("trainer", 0), placement.replica("generator", 0)
    assert (trainer.first_host, trainer.num_hosts, trainer.processes_per_host) == (0, 2, 4)
    assert [env["CUDA_VISIBLE_DEVICES"] for env in trainer.envs] == ["0", "1", "2", "3"] * 2
    assert (generator.devices, generator.first_host) == ((8,), 2)
    assert generator.envs[0]["CUDA_VISIBLE_DEVICES"] == "0"


def test_on_cpu_over_two_nodes_under_torchrun_the_trainer_takes_both() -> None:
    trainer = plan(MeshConfig(), "cpu", slots=2, torchrun_slots=2, num_hosts=2).replica("trainer", 0)
    assert (trainer.num_hosts, trainer.processes_per_host, len(trainer.envs)) == (2, 2, 4)


def test_a_replica_never_straddles_the_end_of_a_node() -> None:
    cfg = MeshConfig(trainer=RoleConfig(procs=3), generator=RoleConfig(procs=2, replicas=2))
    placement = plan(cfg, slots=4, num_hosts=2)
    assert devices(placement, "generator") == [(4, 5), (6, 7)]


@pytest.mark.parametrize(
    ("cfg", "slots", "words"),
    [
        (MeshConfig(trainer=RoleConfig(procs=9)), 8, ["trainer needs 9 device(s)", "pool 'default' has 8"]),
        (MeshConfig(generator=RoleConfig(procs=4, replicas=3)), 8, ["generator needs 12", "has 8"]),
        (MeshConfig(trainer=RoleConfig(pool="trian")), 8, ["mesh.trainer.pool", "'trian'", "default"]),
        (MeshConfig(), 1, ["trainer and generator would share a device", "mesh.colocate=true"]),
        (
            MeshConfig(trainer=RoleConfig(procs=6), generator=RoleConfig(procs=4)),
            8,
            ["trainer and generator would share a device", "mesh.colocate=true"],
        ),
        (
            MeshConfig(pools={"default": 5, "b": 4}),
            8,
            ["mesh.pools ask for 9", "default: 5, b: 4", "there are 8"],
        ),
        (MeshConfig(pools={"default": 0}), 8, ["mesh.pools.default must be >= 1", "got 0"]),
        (MeshConfig(generator=RoleConfig(replicas=0)), 8, ["mesh.generator.replicas must be >= 1, got 0"]),
        (MeshConfig(trainer=RoleConfig(procs=0)), 8, ["mesh.trainer.procs must be >= 1, got 0"]),
        (MeshConfig(trainer=RoleConfig(threads=-1)), 8, ["mesh.trainer.threads must be >= 1, got -1"]),
        (MeshConfig(trainer=RoleConfig(replicas=2)), 8, ["mesh.trainer.replicas must be 1, got 2"]),
        (
            MeshConfig(debug=True, generator=RoleConfig(procs=2)),
            8,
            ["mesh.debug", "mesh.generator.procs is 2"],
        ),
        (MeshConfig(), 0, ["mesh.slots must be >= 1, got 0"]),
    ],
)
def test_a_plan_that_cannot_work_is_refused_with_the_value_and_the_limit(
    cfg: MeshConfig, slots: int, words: list[str]
) -> None:
    with pytest.raises(ConfigError) as error:
        plan(cfg, slots=slots)
    for word in words:
        assert word in str(error.value)


def test_ranks_that_neither_fit_a_node_nor_fill_nodes_are_refused() -> None:
    with pytest.raises(ConfigError, match="6 is more than the 4 slots of a node"):
        plan(MeshConfig(trainer=RoleConfig(procs=6)), slots=4, num_hosts=2)


def test_a_generator_over_two_nodes_is_refused() -> None:
    with pytest.raises(ConfigError, match="spans 2 nodes"):
        plan(MeshConfig(generator=RoleConfig(procs=8)), slots=4, num_hosts=3)


def test_replicas_that_would_straddle_nodes_are_not_blamed_on_another_role() -> None:
    cfg = MeshConfig(pools={"default": 6}, generator=RoleConfig(procs=3, replicas=2))
    with pytest.raises(ConfigError, match="without crossing a node's end"):
        plan(cfg, slots=4, num_hosts=2, roles=("generator",))


def test_a_replica_number_beyond_the_plan_is_refused() -> None:
    with pytest.raises(ConfigError, match="generator has 1 replica"):
        plan(MeshConfig()).replica("generator", 1)


def test_fewer_visible_devices_than_slots_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"CUDA_VISIBLE_DEVICES lists 1 device"):
        plan(MeshConfig(), slots=2, device_names=["3"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_cuda_is_refused_where_there_is_no_gpu_and_auto_falls_back_to_cpu() -> None:
    with pytest.raises(ConfigError, match=r"mesh\.device is cuda, but torch sees no GPU"):
        detect_device(MeshConfig(device="cuda"), None)
    assert detect_device(MeshConfig(), 2) == ("cpu", 2)


def test_slots_of_the_config_win_over_those_of_torchrun() -> None:
    assert detect_device(MeshConfig(device="cpu", slots=3), 2) == ("cpu", 3)
    assert detect_device(MeshConfig(device="cpu"), 2) == ("cpu", 2)


@given(
    slots=st.integers(1, 8),
    num_hosts=st.integers(1, 3),
    trainer=st.integers(1, 16),
    generator=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    reference=st.tuples(st.integers(1, 4), st.integers(1, 2)),
)
def test_no_device_is_ever_handed_out_twice(
    slots: int, num_hosts: int, trainer: int, generator: tuple[int, int], reference: tuple[int, int]
) -> None:
    cfg = MeshConfig(
        trainer=RoleConfig(procs=trainer),
        generator=RoleConfig(procs=generator[0], replicas=generator[1]),
        reference=RoleConfig(procs=reference[0], replicas=reference[1]),
    )
    try:
        placement = plan(cfg, slots=slots, num_hosts=num_hosts, roles=("trainer", "generator", "reference"))
    except ConfigError:
        return
    replicas = [replica for role in placement.roles.values() for replica in role.replicas]
    taken = [device for replica in replicas for device in replica.devices]
    assert len(taken) == len(set(taken)) == trainer + generator[0] * generator[1] + reference[0] * reference[1]
    assert max(taken) < slots * num_hosts
    for replica in replicas:
        nodes = {device // slots for device in replica.devices}
        assert nodes == set(range(replica.first_host, replica.first_host + replica.num_hosts))
        assert len(replica.envs) == replica.num_hosts * replica.processes_per_host
    names = [replica.name for replica in replicas]
    assert len(names) == len(set(names))
