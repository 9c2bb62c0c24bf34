"""What the variables of mpirun and srun become; the real launchers run in cluster/test_launchers.py."""

import os
import socket
import sys

import psutil
import pytest
from torch.distributed import TCPStore

from dsft.cli.main import main
from dsft.errors import UserError
from dsft.runtime import launcher_env
from dsft.runtime.launcher_env import (
    SINGLE_PROCESS_ENV,
    choose_interface,
    first_host,
    free_port,
    launcher_variables,
    map_launcher_variables,
)

# As slurmd of 22.05 sets them for task 3 of `srun -N2 -n3`, the second node holding two.
SLURM_TASK = {
    "SLURM_JOB_ID": "1234567",
    "SLURM_JOB_NODELIST": "gpu[07-09]",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gpu[08-09]",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "1,2",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.250",
}
SLURM_BATCH = {
    "SLURM_JOB_ID": "1234567",
    "SLURM_JOB_NODELIST": "gpu[07-09]",
    "SLURM_NTASKS": "8",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_TASKS_PER_NODE": "4(x2)",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "3141592",
}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}


def ranks(variables: dict) -> tuple:
    return tuple(variables[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE"))


def test_a_task_of_srun_is_a_rank_and_the_first_node_of_its_step_is_the_master():
    variables = launcher_variables(SLURM_TASK)
    assert ranks(variables) == ("2", "3", "1", "2") and (variables["MASTER_ADDR"], variables["MASTER_PORT"]) == (
        "gpu08",
        "24567",
    )


def test_a_task_that_sees_one_gpu_alone_takes_that_one():
    assert launcher_variables(SLURM_TASK | {"CUDA_VISIBLE_DEVICES": "3"})["LOCAL_RANK"] == "0"
    assert launcher_variables(SLURM_TASK | {"CUDA_VISIBLE_DEVICES": "0,1"})["LOCAL_RANK"] == "1"


@pytest.mark.parametrize(
    "given",
    [
        {},
        SLURM_BATCH,
        SLURM_TASK | {"SLURM_STEP_NUM_TASKS": "1"},
        SLURM_TASK | {"RANK": "7"},
        OPENMPI | {"RANK": "7"},
        OPENMPI | {"OMPI_COMM_WORLD_SIZE": "1"},
    ],
    ids=["nothing", "batch script", "interactive shell", "torchrun in a task", "RANK beside MPI", "one MPI process"],
)
def test_other_processes_are_left_alone(given):
    assert launcher_variables(given) == {}


def test_openmpi_goes_before_slurm_whose_variables_are_those_of_its_helpers():
    variables = launcher_variables(SLURM_TASK | OPENMPI)
    assert (
        ranks(variables) == ("5", "8", "1", "4")
        and "MASTER_ADDR" not in variables
        and 20000 <= int(variables["MASTER_PORT"]) < 30000
    )
    assert launcher_variables(OPENMPI | {"PMIX_NAMESPACE": "2718281"})["MASTER_PORT"] != variables["MASTER_PORT"]


def test_mpi_on_one_node_needs_no_address():
    variables = launcher_variables(HYDRA)
    assert ranks(variables) == ("1", "2", "1", "2") and variables["MASTER_ADDR"] == "127.0.0.1"


def test_mpi_on_several_nodes_without_an_address_is_one_clear_error(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # so that monkeypatch takes away what is set below
        monkeypatch.delenv(name)
    for name, value in OPENMPI.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="mpirun -x MASTER_ADDR"):
        map_launcher_variables()
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    monkeypatch.delenv("RANK")
    map_launcher_variables()
    map_launcher_variables()  # a second call changes nothing


def test_an_interface_that_does_not_exist_is_named(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    with pytest.raises(UserError, match="GLOO_SOCKET_IFNAME=nowhere0, but the interfaces are .*lo"):
        map_launcher_variables()


def test_variables_of_an_earlier_launch_are_not_followed(monkeypatch):
    left = {"ACCELERATE_MIXED_PRECISION": "fp8", "ACCELERATE_USE_CPU": "true", "OMPI_COMM_WORLD_LOCAL_RANK": "2"}
    left |= {"ACCELERATE_TORCH_DEVICE": "cuda", "ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}
    left |= {"ACCELERATE_USE_MEGATRON_LM": "true"}
    for name, value in {**SINGLE_PROCESS_ENV, **left}.items():
        monkeypatch.setenv(name, value)
    map_launcher_variables()
    assert not left.keys() & os.environ.keys()


def test_a_free_port_is_given_once_and_rank_0_can_listen_there(monkeypatch):
    """Of nine launches that began at once two had one port, once in 300 times."""
    port = free_port()
    drawn = iter([port - 20_000, *range(12_768)])
    monkeypatch.setattr(launcher_env.secrets, "randbelow", lambda most: next(drawn))
    assert free_port() != port
    assert TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False).port == port


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node-0", "node-0"),
        ("node-[0-3,7],login", "node-0"),
        ("gpu[007,009]", "gpu007"),
        ("rack[1-2]n[3,5]", "rack1n3"),
    ],
)
def test_first_host_of_a_node_list(nodes, first):
    assert first_host(nodes) == first


def an_interface() -> tuple[str, str]:
    """Name and IPv4 address of an interface of this machine that is not loopback."""
    for name, addresses in psutil.net_if_addrs().items():
        for entry in addresses:
            if (
                entry.family == socket.AF_INET
                and not entry.address.startswith(("127.", "169.254."))
                and psutil.net_if_stats()[name].isup
            ):
                return name, entry.address
    pytest.skip("this machine has no network")


def test_the_interface_is_never_loopback(monkeypatch):
    name, address = an_interface()
    for variable, value in {"WORLD_SIZE": "2", "LOCAL_SIZE": "1", "GLOO_SOCKET_IFNAME": "mine"}.items():
        monkeypatch.setenv(variable, value)
    for master in (address, "127.0.1.1"):
        monkeypatch.setenv("MASTER_ADDR", master)
        monkeypatch.setenv("NCCL_SOCKET_IFNAME", "")  # so that monkeypatch takes away what is set below
        monkeypatch.delenv("NCCL_SOCKET_IFNAME")
        choose_interface()
        chosen = os.environ.get("NCCL_SOCKET_IFNAME")
        assert chosen == f"={name}" if master == address else chosen not in ("=lo", "=lo0")


def test_the_interface_is_named_only_across_nodes_and_only_where_unset(monkeypatch):
    name, address = an_interface()
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(variable, "")
        monkeypatch.delenv(variable)
    monkeypatch.setenv("MASTER_ADDR", address)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_SIZE", "2")
    choose_interface()
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    monkeypatch.setenv("LOCAL_SIZE", "1")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "mine")
    choose_interface()
    assert (os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]) == (name, "mine")


def test_a_command_unsets_the_variables_of_a_single_process_and_a_call_within_it_keeps_them(monkeypatch):
    """A notebook that trained holds the process group of these variables; the commands it starts inherit them."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, {"WORLD_SIZE": "1"}.get(name, "0"))
    with pytest.raises(SystemExit):
        main(["checkpoints", "./nowhere"])
    assert os.environ["LOCAL_RANK"] == "0"
    monkeypatch.setattr(sys, "argv", ["dsft", "checkpoints", "./nowhere"])
    with pytest.raises(SystemExit):
        main()
    assert "LOCAL_RANK" not in os.environ and "MASTER_PORT" not in os.environ
