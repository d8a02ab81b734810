"""Does a process started by srun or mpirun become the right rank, and a shell inside an allocation none?"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.runs import series, write_corpus
from triax.errors import BadInput
from triax.launch.environment import torchrun_variables

ROOT = Path(__file__).parent.parent.parent

# What srun sets for task 5 of 8 on two servers of four.
STEP = {
    "SLURM_JOB_ID": "1234567", "SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
    "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_STEP_NODELIST": "gpu[003-004]", "SLURM_JOB_NODELIST": "gpu[001-004]",
}  # fmt: skip
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}  # fmt: skip
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}


def test_srun() -> None:
    said = torchrun_variables(STEP)
    port = int(said.pop("MASTER_PORT"))
    assert said == {
        "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "gpu003",
    }  # fmt: skip
    assert 1024 < port < 32768


def test_all_tasks_of_a_step_come_to_one_port_and_other_jobs_to_another() -> None:
    def port(**changed: str) -> str:
        return torchrun_variables({**STEP, **changed})["MASTER_PORT"]

    assert port() == port(SLURM_PROCID="0", SLURM_LOCALID="0", SLURM_NODEID="0")
    ports = [port(SLURM_JOB_ID=str(job), SLURM_STEP_ID=str(step)) for job in range(2000, 2020) for step in range(10)]
    assert len(set(ports)) == len(ports)


@pytest.mark.parametrize(
    ("nodelist", "first"),
    [
        ("gpu[003-006,010],login1", "gpu003"),
        ("gpu[010,003]", "gpu010"),
        ("login1,gpu[1-2]", "login1"),
        ("rack[1-2]node[03-06,9],x", "rack1node03"),
        ("n[1-2]-ib.cluster,n7", "n1-ib.cluster"),
        ("one", "one"),
    ],
)
def test_the_first_server_of_a_list(nodelist: str, first: str) -> None:
    assert torchrun_variables({**STEP, "SLURM_STEP_NODELIST": nodelist})["MASTER_ADDR"] == first


def test_the_list_of_the_job_serves_where_the_step_has_none() -> None:
    step = {key: value for key, value in STEP.items() if key != "SLURM_STEP_NODELIST"}
    assert torchrun_variables(step)["MASTER_ADDR"] == "gpu001"


def test_torchruns_variables_win() -> None:
    assert torchrun_variables({**STEP, **MPIRUN, "RANK": "0", "WORLD_SIZE": "2"}) == {}


def test_an_address_that_is_set_stays() -> None:
    said = torchrun_variables({**STEP, "MASTER_ADDR": "head", "MASTER_PORT": "2000"})
    assert (said["MASTER_ADDR"], said["MASTER_PORT"]) == ("head", "2000")


@pytest.mark.parametrize(
    "shell",
    [
        {},
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_JOB_NODELIST": "gpu[1-2]"},  # salloc
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},  # sbatch
        {**STEP, "SLURM_STEP_ID": "4294967291"},  # sbatch, of versions that number its step
        {**STEP, "SLURM_STEP_ID": "4294967290"},  # salloc, inside an interactive step
        {**STEP, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"},  # srun --pty bash
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0",
         "OMPI_COMM_WORLD_LOCAL_SIZE": "1"},
        {"PMI_RANK": "0", "PMI_SIZE": "1"},
    ],
)  # fmt: skip
def test_a_process_that_is_alone_is_no_rank(shell: dict[str, str]) -> None:
    assert "RANK" not in torchrun_variables(shell)


@pytest.mark.parametrize("family", [MPIRUN, HYDRA], ids=["Open MPI", "Hydra"])
def test_mpirun(family: dict[str, str]) -> None:
    said = torchrun_variables({**family, "MASTER_ADDR": "head"})
    assert (said["RANK"], said["WORLD_SIZE"], said["LOCAL_RANK"], said["LOCAL_WORLD_SIZE"]) == ("3", "4", "1", "2")
    # Its daemon was started by srun, one task on each server: those variables say nothing about the ranks.
    daemon = {**STEP, "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
    inside = torchrun_variables({**daemon, **family})
    assert (inside["RANK"], inside["WORLD_SIZE"], inside["MASTER_ADDR"]) == ("3", "4", "gpu003")


def test_mpirun_on_one_server_needs_no_address() -> None:
    said = torchrun_variables({**MPIRUN, "OMPI_COMM_WORLD_LOCAL_RANK": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"})
    assert said["MASTER_ADDR"] == "127.0.0.1"


def test_srun_with_pmi2_says_the_local_rank() -> None:
    said = torchrun_variables({**STEP, "PMI_RANK": "5", "PMI_SIZE": "8"})
    assert (said["RANK"], said["LOCAL_RANK"], said["LOCAL_WORLD_SIZE"]) == ("5", "1", "4")


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        ({**STEP, "SLURM_PROCID": "nine"}, "SLURM_PROCID='nine' is no number"),
        ({**STEP, "SLURM_PROCID": "8"}, "contradicts itself"),
        ({**STEP, "SLURM_STEP_TASKS_PER_NODE": "5,3"}, "--ntasks-per-node"),
        ({**STEP, "SLURM_STEP_TASKS_PER_NODE": ""}, "--ntasks-per-node"),
        ({**STEP, "SLURM_STEP_TASKS_PER_NODE": "4(x3)"}, "--ntasks-per-node"),
        ({**STEP, "SLURM_PROCID": "2", "SLURM_LOCALID": "1"}, "--distribution=block"),
        ({**STEP, "SLURM_STEP_NODELIST": "a b"}, "MASTER_ADDR"),
        (MPIRUN, "does not say where rank 0 is: set MASTER_ADDR"),
        ({**MPIRUN, "OMPI_COMM_WORLD_LOCAL_RANK": "0"}, "mpirun --map-by slot"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_SIZE='' is no number"),
        ({"PMI_RANK": "1", "PMI_SIZE": "4"}, "LOCAL_RANK"),
        ({**STEP, "PMI_RANK": "1", "PMI_SIZE": "4"}, "LOCAL_RANK"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_told_in_a_sentence(environment: dict[str, str], sentence: str) -> None:
    with pytest.raises(BadInput, match=sentence.replace("(", r"\(")):
        torchrun_variables(environment)


def test_two_tasks_of_a_step_train_as_one_run(tmp_path: Path) -> None:
    write_corpus(tmp_path, 4000)
    run_file = tmp_path / "run.toml"
    run_file.write_text(
        "[model]\nhidden_size = 16\nintermediate_size = 24\nnum_hidden_layers = 1\nnum_attention_heads = 2\n"
        'vocab_size = 257\n[data]\ntrain = ["corpus.jsonl"]\nseq_len = 32\ncache_dir = "cache"\n'
        "[train]\nsteps = 2\nsequences_per_step = 4\n[watch]\ntensorboard = false\n"
        '[precision]\ncompute = "fp32"\n'
    )
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "OMPI_", "PMI_"))}
    step = {**clean, **STEP, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NODEID": "0"}
    step |= {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_NODELIST": "localhost"}
    command = [sys.executable, "-m", "triax", "train", str(run_file), "--run-dir", str(tmp_path / "run"), "--quiet"]
    tasks = [
        subprocess.Popen(
            command, cwd=ROOT, env={**step, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
            stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    told = [task.communicate(timeout=120)[1] for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0], told
    assert series(tmp_path / "run", "step") == [1, 2]
    layout = json.loads((tmp_path / "run" / "plan.json").read_text())["layout"]
    assert layout["dp_replicate"] * layout["dp_shard"] == 2
