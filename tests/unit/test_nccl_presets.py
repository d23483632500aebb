"""NCCL presets on faked fabrics: what they choose, what they leave to the user, and what they refuse."""

import os
from dataclasses import fields

import pytest

from recipes.cluster import network
from recipes.cluster.nccl_presets import PRESETS, Fabric, choose_preset, count_nodes
from recipes.cluster.network import Route
from recipes.config.errors import UserError
from recipes.config.run_config import PretrainConfig

ETHERNET = Route("eth1", "10.0.0.2")
PORTS = ("mlx5_0:1", "mlx5_1:1")
RECORDER = {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
DEBUGGING = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL", "NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,ENV,NET,GRAPH"}
SOCKETS = {"NCCL_SOCKET_IFNAME": "=eth1", "NCCL_IB_DISABLE": "1"}
INFINIBAND = {"NCCL_SOCKET_IFNAME": "=eth1", "NCCL_IB_HCA": "=mlx5_0:1,mlx5_1:1"}


def gpus(nodes, infiniband=(), **other):
    values = {"master": "10.0.0.1", "route": ETHERNET, "nccl_version": (2, 27, 5)} | other
    return Fabric(nodes=nodes, device_type="cuda", infiniband=infiniband, **values)


def chosen(name, fabric, **user):
    return choose_preset(name, fabric, zero_stage=2, user=user).result()


@pytest.mark.parametrize(
    ("name", "fabric", "preset", "variables"),
    [
        ("auto", gpus(1), "single_node", {"NCCL_SOCKET_IFNAME": "=lo"}),
        ("auto", gpus(1, PORTS), "single_node", {"NCCL_SOCKET_IFNAME": "=lo"}),
        ("auto", gpus(2), "ethernet", SOCKETS),
        ("auto", gpus(8, PORTS), "infiniband", INFINIBAND),
        ("auto", gpus(9), "large", SOCKETS | {"NCCL_ALGO": "allreduce:tree"}),
        ("auto", gpus(9, PORTS), "large", INFINIBAND | {"NCCL_ALGO": "allreduce:tree", "NCCL_IB_TIMEOUT": "22"}),
        ("large", gpus(9, nccl_version=(2, 24, 3)), "large", SOCKETS | {"NCCL_ALGO": "allreduce:tree"}),
        ("large", gpus(9, nccl_version=(2, 23, 4)), "large", SOCKETS | {"NCCL_ALGO": "Tree"}),
        ("ethernet", gpus(2, PORTS), "ethernet", SOCKETS),
        (
            "ethernet",
            gpus(2, gbits=100.0),
            "ethernet",
            SOCKETS | {"NCCL_SOCKET_NTHREADS": "4", "NCCL_NSOCKS_PERTHREAD": "4"},
        ),
        ("debug", gpus(2, PORTS), "debug", INFINIBAND | DEBUGGING),
        ("ethernet", gpus(1, master=None, route=None), "ethernet", {"NCCL_IB_DISABLE": "1"}),
    ],
)
def test_the_variables_on_gpus(name, fabric, preset, variables):
    found = chosen(name, fabric)
    assert (found["name"], found["set"]) == (preset, variables | RECORDER)


def test_cpu_ranks_of_several_nodes_get_the_interface_to_the_master():
    fabric = Fabric(nodes=2, device_type="cpu", master="10.0.0.1", route=ETHERNET)
    assert chosen("auto", fabric)["set"] == {"GLOO_SOCKET_IFNAME": "eth1"}
    assert chosen("auto", Fabric(nodes=1, device_type="cpu", master="127.0.0.1"))["set"] == {}
    assert chosen("none", fabric)["set"] == {}


def test_what_the_user_set_wins_under_its_old_name_too():
    found = chosen("auto", gpus(2), NCCL_SOCKET_IFNAME="bond0", TORCH_NCCL_TRACE_BUFFER_SIZE="9")
    assert found["set"] == {"NCCL_IB_DISABLE": "1", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
    assert found["kept"] == {"NCCL_SOCKET_IFNAME": "bond0", "TORCH_FR_BUFFER_SIZE": "9"}


def test_nccls_own_file_counts_as_the_users_word(tmp_path, monkeypatch):
    file = tmp_path / "nccl.conf"
    file.write_text("# ours\nNCCL_IB_DISABLE=0\n")
    monkeypatch.setenv("NCCL_CONF_FILE", str(file))
    found = choose_preset("auto", gpus(2), zero_stage=0).result()
    assert found["kept"] == {"NCCL_IB_DISABLE": "0"}


def test_each_variable_is_printed_with_its_reason():
    preset = choose_preset("auto", gpus(9, PORTS), zero_stage=2, user={"NCCL_IB_TIMEOUT": "20"})
    text = "\n".join(preset.lines())
    assert "large: chosen for 9 nodes, InfiniBand or RoCE on mlx5_0:1, mlx5_1:1" in text
    for one in preset.settings:
        assert one.reason and (f"{one.name}={one.value}: {one.reason}" in text) == (one.kept is None)
    assert "NCCL_IB_TIMEOUT=20 is yours and stays (preset: 22)" in text


def test_applying_sets_only_what_is_not_kept(monkeypatch):
    monkeypatch.setattr(os, "environ", {"NCCL_IB_DISABLE": "0"})
    choose_preset("ethernet", gpus(2), zero_stage=0).apply()
    assert os.environ == {"NCCL_IB_DISABLE": "0", "NCCL_SOCKET_IFNAME": "=eth1"} | RECORDER


@pytest.mark.parametrize(
    ("algorithms", "stage", "warned"),
    [
        ("Tree", 1, True),
        ("tree,nvlstree", 3, True),
        ("^ring", 2, True),
        ("tree;allreduce:ring", 2, True),
        ("Tree", 0, False),
        ("Tree,Ring", 1, False),
        ("allreduce:tree", 1, False),
        ("^tree", 1, False),
        ("ring;allreduce:tree", 1, False),
        ("", 1, False),
    ],
)
def test_a_tree_for_everything_is_warned_about_under_zero(algorithms, stage, warned):
    user = {"NCCL_ALGO": algorithms} if algorithms else {}
    found = choose_preset("none", gpus(2), zero_stage=stage, user=user).warnings
    assert bool(found) == warned
    assert all("allreduce:tree" in text for text in found)


@pytest.mark.parametrize(
    ("name", "fabric", "words"),
    [
        ("single_node", gpus(2), "this job has 2 nodes"),
        ("infiniband", gpus(2), "no port in /sys/class/infiniband is active"),
        ("auto", gpus(2, route=Route("lo", "127.0.1.1"), master="node1"), "loopback"),
        ("auto", gpus(2, route=None), "cannot find it"),
        ("auto", Fabric(2, "cpu", "node1", Route("lo", "127.0.1.1")), "loopback"),
    ],
)
def test_what_cannot_work_is_refused(name, fabric, words):
    with pytest.raises(UserError, match=words):
        chosen(name, fabric)


def test_active_ports_of_one_kind(tmp_path):
    for device, port, state, layer in (
        ("mlx5_0", 1, "4: ACTIVE", "InfiniBand"),
        ("mlx5_1", 1, "1: DOWN", "InfiniBand"),
        ("mlx5_2", 1, "4: ACTIVE", "Ethernet"),  # the management port of many a node
        ("mlx5_3", 2, "4: ACTIVE", "InfiniBand"),
    ):
        folder = tmp_path / device / "ports" / str(port)
        folder.mkdir(parents=True)
        (folder / "state").write_text(state + "\n")
        (folder / "link_layer").write_text(layer + "\n")
    assert network.infiniband_ports(tmp_path) == ["mlx5_0:1", "mlx5_3:2"]
    assert network.infiniband_ports(tmp_path / "nowhere") == []


def test_the_way_to_this_host_is_the_interface_that_has_the_address():
    for interface, addresses in network.interfaces().items():
        for address in (a for a in addresses if ":" not in a):
            assert network.route_to(address) == Route(interface, address)
    assert network.route_to("127.0.0.1").is_loopback
    assert network.route_to("no-such-host.invalid") is None


def test_nodes_by_what_the_launcher_says(monkeypatch):
    for name in ("CROSS_SIZE", "GROUP_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert count_nodes(16, 8) == 2 and count_nodes(1, 1) == 1
    monkeypatch.setenv("CROSS_SIZE", "3")  # 8 + 4 + 4 slots
    assert count_nodes(16, 4) == 3


def test_the_flag_knows_the_presets():
    flag = {field.name: field for field in fields(PretrainConfig)}["nccl_preset"]
    assert flag.metadata["choices"] == list(PRESETS)
