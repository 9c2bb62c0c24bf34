"""A SLURM on test hosts: munged everywhere, slurmctld on the first, slurmd on each. All its files lie in one folder;
nothing of /etc/slurm is read.

    with Slurm(hosts[:2], folder) as slurm:
        job = slurm.submit(["scripts/slurm/torchrun.sbatch", "--config", "run.yaml"])
        state = slurm.wait(job)

The hosts' `run` then finds the configuration too: `host.run(["sinfo"])`.
"""

import os
import subprocess
import time
from pathlib import Path

from cluster.hosts import Host

CONFIG = """ClusterName=test
SlurmctldHost={controller}({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=/run/munge.socket
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=0,sched_interval=1,requeue_delay=0
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=5
MinJobAge=600
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=60 State=UP
"""
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL"}


class Slurm:
    """SLURM of two CPUs per host. Whatever runs on the hosts ends with them; leaving the context ends SLURM's own
    processes.
    """

    def __init__(self, hosts: list[Host], folder: Path):
        self.hosts, self.folder = hosts, Path(folder)
        self.variables = {"SLURM_CONF": str(self.folder / "slurm.conf")}
        self._daemons = []

    def __enter__(self) -> "Slurm":
        (self.folder / "state").mkdir(parents=True)
        (self.folder / "munge.key").write_bytes(os.urandom(1024))
        (self.folder / "munge.key").chmod(0o400)
        (self.folder / "cgroup.conf").write_text(f"CgroupPlugin={_cgroup_plugin()}\n")
        nodes = "\n".join(
            f"NodeName={host.name} NodeAddr={host.address} CPUs=2 RealMemory=2000 State=UNKNOWN" for host in self.hosts
        )
        (self.folder / "slurm.conf").write_text(
            CONFIG.format(controller=self.hosts[0].name, address=self.hosts[0].address, folder=self.folder, nodes=nodes)
        )
        try:
            for host in self.hosts:
                host.environment |= self.variables
                (self.folder / f"spool-{host.name}").mkdir()
                self._start(
                    host,
                    [
                        "munged",
                        "--foreground",
                        "--force",
                        f"--key-file={self.folder}/munge.key",
                        "--socket=/run/munge.socket",
                        "--pid-file=/run/munged.pid",
                        "--seed-file=/run/munge.seed",
                        f"--log-file={self.folder}/munged-{host.name}.log",
                    ],
                )
            self._start(self.hosts[0], ["slurmctld", "-D"])
            for host in self.hosts:
                self._start(host, ["slurmd", "-D", "-N", host.name])
            self._wait_idle()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error) -> None:
        for host in self.hosts:
            host.environment.pop("SLURM_CONF", None)
        for daemon in reversed(self._daemons):
            daemon.kill()
            daemon.wait()

    def submit(self, command: list, **environment: str) -> int:
        """`sbatch COMMAND` on the first host; the job's number."""
        result = self.hosts[0].run(["sbatch", "--parsable", *command], **environment)
        assert result.returncode == 0, result.stderr
        return int(result.stdout)

    def job(self, number: int) -> dict[str, str]:
        """What scontrol says of a job: JobState, ExitCode, Restarts ..."""
        result = self.hosts[0].run(["scontrol", "show", "--oneliner", "job", number])
        assert result.returncode == 0, result.stderr
        return dict(word.split("=", 1) for word in result.stdout.split() if "=" in word)

    def wait(self, number: int, *, timeout: float = 600, until=lambda job: job["JobState"] in ENDED) -> dict[str, str]:
        """The job's facts once `until` holds for them: by default once it has ended."""
        deadline = time.monotonic() + timeout
        while not until(job := self.job(number)):
            assert time.monotonic() < deadline, f"job {number} is still {job['JobState']} after {timeout} s"
            time.sleep(0.3)
        return job

    def _start(self, host: Host, command: list[str]) -> None:
        log = open(self.folder / f"{command[0]}-{host.name}.out", "w")  # noqa: SIM115
        self._daemons.append(host.start(command, stdout=log, stderr=log))

    def _wait_idle(self) -> None:
        deadline = time.monotonic() + 120
        while self.hosts[0].run(["sinfo", "--noheader", "--format=%T %D"]).stdout.split() != [
            "idle",
            str(len(self.hosts)),
        ]:
            logs = "\n".join(path.read_text()[-1000:] for path in self.folder.glob("*.out"))
            assert time.monotonic() < deadline, f"SLURM did not come up: {logs}"
            time.sleep(0.2)


def _cgroup_plugin() -> str:
    """slurmd loads one though nothing here uses cgroups; versions before 23 cannot do without."""
    version = subprocess.run(["/usr/sbin/slurmd", "-V"], capture_output=True, text=True, check=True).stdout.split()[-1]
    return "disabled" if int(version.split(".")[0]) >= 23 else "cgroup/v1"
