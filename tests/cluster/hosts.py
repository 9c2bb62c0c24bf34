"""Real hosts for tests, on one machine: namespaces of the Linux kernel, each with its own address, host name, processes
and sshd.

    with TestHosts(4) as hosts:
        hosts[0].run(["pdsh", "-w", ",".join(host.name for host in hosts), "hostname"])
        hosts[1].cut()   # its cable is pulled; hosts[1].heal() puts it back

A host is a network, UTS, mount, PID and IPC namespace: own /etc/hosts, /dev/shm, /tmp, /run, home folder with ssh
keys. The rest of the file system is shared, like one mounted on every node of a cluster; what a test shares below /tmp
it names (`shared`). The bridge that joins the hosts lives in a namespace of its own, so nothing of this machine's
network, ~/.ssh or /etc/ssh is touched or needed, and several `TestHosts` stand side by side with the same names and
addresses. Up in about a second. Needs root and the Debian packages `PACKAGES`.

What it is not: separate kernels, clocks or disks.
"""

import atexit
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch.utils.cpp_extension

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "ip": "iproute2",
    "sshd": "openssh-server",
    "ssh-keygen": "openssh-client",
    "pdsh": "pdsh",
    "mpirun": "openmpi-bin",
    "slurmctld": "slurm-wlm",
    "munged": "munge",
    "unshare": "util-linux",
    "iptables": "iptables",
    "faketime": "faketime",
}
"""Program -> Debian package."""
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
OWN_COMMANDS = (
    "sshd:",
    "/usr/sbin/sshd",
    "nsenter --target",
    "setpriv --pdeathsig",
    "munged ",
    "slurmctld ",
    "slurmd ",
    "slurmstepd:",
    ": slurmscriptd",
)
"""Services of a host, and what is on its way into it."""
NAMESPACES = ("--net", "--uts", "--mount", "--pid", "--ipc")
LISTENING = "0A"
"""State of a listening socket in /proc/net/tcp."""


def why_not() -> str:
    """Why no test hosts can stand on this machine, or an empty string."""
    if os.geteuid() != 0:
        return "test hosts need root"
    missing = sorted({package for program, package in PACKAGES.items() if not shutil.which(program, path=SYSTEM_PATH)})
    return f"test hosts need these packages: {' '.join(missing)}" if missing else ""


def compiled_ops() -> str:
    """Where this machine keeps DeepSpeed's compiled operators: the hosts get a copy, to compile nothing anew."""
    if "TORCH_EXTENSIONS_DIR" in os.environ:
        return os.environ["TORCH_EXTENSIONS_DIR"]
    python = f"py{sys.version_info.major}{sys.version_info.minor}{sys.abiflags}"
    return str(Path(torch.utils.cpp_extension.get_default_build_root()) / f"{python}_cpu")


class Started(subprocess.Popen):
    """A command in a host. A signal goes to the command itself, which nsenter, the process in between, would not pass
    on.
    """

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            for command in psutil.Process(self.pid).children() or [psutil.Process(self.pid)]:
                command.send_signal(number)


class Host:
    """One host. `name`, `address`; `init_pid` is its process 1, seen from outside; `folder` holds its own files."""

    def __init__(self, name: str, address: str, folder: Path, switch_pid: int):
        self.name, self.address, self.folder, self.switch_pid = name, address, folder, switch_pid
        self.home = folder / "home"
        self.etc_hosts = folder / "hosts"
        """The host's /etc/hosts: written here, seen there at once."""
        self.init_pid = 0
        self.environment = {
            "HOME": str(self.home),
            "USER": "root",
            "LOGNAME": "root",
            "SHELL": "/bin/bash",
            "LANG": "C.UTF-8",
            "PATH": f"{Path(sys.executable).parent}:{SYSTEM_PATH}",
            "OMP_NUM_THREADS": "1",
            "TORCH_EXTENSIONS_DIR": str(folder.parent / "torch_extensions"),
            "HF_HUB_OFFLINE": "1",
            "DS_ACCELERATOR": "cpu",
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        }
        """What a login shell there has, through ssh as well."""

    def start(
        self, command: list, *, cwd: Path = ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **environment: str
    ) -> Started:
        """Start a command there, as from a fresh login shell with `environment` added. Ends with the host, at the
        latest.
        """
        enter = ["nsenter", "--target", str(self.init_pid), *NAMESPACES]
        enter.append(f"--wdns={cwd}")  # --wd would be of the mounts outside: a rename there from a path inside is EXDEV
        return Started(
            [*enter, "--", "setpriv", "--pdeathsig", "KILL", "--", *map(str, command)],
            env=self.environment | environment,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            text=True,
            start_new_session=True,
        )

    def run(
        self, command: list, *, cwd: Path = ROOT, timeout: float = 300, **environment: str
    ) -> subprocess.CompletedProcess:
        """Run a command there and return its exit code and output.

        Raises:
            subprocess.TimeoutExpired: after `timeout` seconds, with the output so far; the command is killed, what it
            started keeps running.
        """
        # To files: what the command left running in the background may keep a pipe open for ever.
        with (
            tempfile.TemporaryFile("w+", errors="replace") as out,
            tempfile.TemporaryFile("w+", errors="replace") as err,
        ):
            process = self.start(command, cwd=cwd, stdout=out, stderr=err, **environment)
            try:
                process.wait(timeout)
            except BaseException as error:
                process.kill()
                process.wait()
                if isinstance(error, subprocess.TimeoutExpired):
                    error.output, error.stderr = _content(out), _content(err)
                raise
            return subprocess.CompletedProcess(
                list(map(str, command)), process.returncode, _content(out), _content(err)
            )

    def all_processes(self) -> list[psutil.Process]:
        """Every process of this host."""
        try:
            mine = os.readlink(f"/proc/{self.init_pid}/ns/pid")
        except OSError:
            return []
        return [process for process in psutil.process_iter() if _pid_namespace(process.pid) == mine]

    def processes(self) -> list[tuple[int, str]]:
        """(pid, command line) of what runs there besides init, sshd and SLURM's daemons; pids as seen from outside, for
        `kill`.
        """
        commands = []
        for process in self.all_processes():
            try:
                command = " ".join(process.cmdline())
                if (
                    process.pid != self.init_pid
                    and process.status() != psutil.STATUS_ZOMBIE
                    and command
                    and not command.startswith(OWN_COMMANDS)
                ):
                    commands.append((process.pid, command))
            except psutil.NoSuchProcess:
                pass
        return commands

    def is_idle(self, *, seconds: float = 60) -> bool:
        """Whether `processes` names nothing, now or soon: what ends on a busy machine takes a moment."""
        deadline = time.monotonic() + seconds
        while self.processes() and time.monotonic() < deadline:
            time.sleep(0.1)
        return not self.processes()

    def kill(self, pid: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to a process of this host, by a pid from `processes`."""
        assert any(pid == process.pid for process in self.all_processes()), f"{pid} is no process of {self.name}"
        os.kill(pid, number)

    def kill_all(self) -> None:
        """Kill everything that `processes` names: for the end of a test of faults."""
        for pid, _ in self.processes():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass

    def cut(self) -> None:
        """Pull the cable at the switch: connections are lost without a word, and the host lives on."""
        self._cable("down")

    def heal(self) -> None:
        """Put the cable back."""
        self._cable("up")

    def _cable(self, state: str) -> None:
        _run(f"nsenter --target {self.switch_pid} --net ip link set port-{self.name} {state}".split())

    def freeze(self) -> None:
        """Stop every process of this host, sshd too. Its kernel still answers: connections stay open."""
        self._signal_all(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let them all continue."""
        self._signal_all(signal.SIGCONT)

    def _signal_all(self, number: int) -> None:
        for process in self.all_processes():
            try:
                os.kill(process.pid, number)
            except ProcessLookupError:
                pass  # it has just ended

    def port_is_free(self, port: int) -> bool:
        """Whether nothing on this host listens to that TCP port."""
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/{self.init_pid}/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                    return False
        return True

    @contextmanager
    def own_name_on_loopback(self):
        """As Debian's installer writes /etc/hosts: the host's own name is 127.0.1.1 there."""
        before = self.etc_hosts.read_text()
        self.etc_hosts.write_text(before.replace(f"{self.address} {self.name}\n", f"127.0.1.1 {self.name}\n"))
        try:
            yield
        finally:
            self.etc_hosts.write_text(before)


class TestHosts:
    """`number` hosts named node-0, node-1 ... on one bridge. `shared`: folders below /tmp that all of them see, besides
    the checkout and its environment.
    """

    __test__ = False  # no test class, whatever its name

    def __init__(self, number: int, *, shared: list[Path] = ()):
        self.number = number
        on_path = [Path(path) for path in sys.path if Path(path).is_dir()]
        self.shared = [ROOT, Path(sys.prefix), Path(sys.base_prefix), *on_path, *map(Path, shared)]
        self.hosts: list[Host] = []
        self._started: list[subprocess.Popen] = []

    def __enter__(self) -> "TestHosts":
        assert not why_not(), why_not()
        self.folder = Path(tempfile.mkdtemp(prefix="dsft-hosts-"))
        atexit.register(self.stop)
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *error) -> None:
        self.stop()

    def __getitem__(self, index: int) -> Host:
        return self.hosts[index]

    def __len__(self) -> int:
        return len(self.hosts)

    def hostfile(self, path: Path, slots: list[int], first: int = 0) -> Path:
        """Write a DeepSpeed host file of as many hosts as `slots`, from host number `first` on."""
        Path(path).write_text(
            "".join(f"{host.name} slots={n}\n" for host, n in zip(self.hosts[first:], slots, strict=False))
        )
        return Path(path)

    def clean_up(self) -> None:
        """For the end of a test: all cables in, nobody frozen, everything killed that the test left running, and no
        lock of a killed process on the compiled operators.
        """
        for host in self.hosts:
            host.heal()
            host.thaw()
            host.kill_all()
        for lock in self.folder.glob("torch_extensions/*/lock"):
            lock.unlink()

    def stop(self) -> None:
        """End everything that was started, by its id: a namespace's process 1 takes all others of it along. Safe to
        call again.
        """
        atexit.unregister(self.stop)
        for process in reversed(self._started):
            process.kill()
        for process in self._started:
            process.wait()
            process.stdout.close()
        self._started.clear()
        deadline = time.monotonic() + 60
        while any(host.all_processes() for host in self.hosts) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert str(self.folder) not in Path("/proc/self/mountinfo").read_text(), (
            f"{self.folder} holds a mount point; not removed"
        )
        shutil.rmtree(self.folder, ignore_errors=True)

    def _start(self) -> None:
        script = "ip link add bridge type bridge; ip link set bridge up; echo ready; exec sleep infinity"
        switch = self._launch(["unshare", "--net", "--", "bash", "-ec", script])
        self.hosts = [
            Host(f"node-{i}", f"10.77.0.{i + 1}", self.folder / f"node-{i}", switch.pid) for i in range(self.number)
        ]
        _write_files(self.folder, self.hosts)
        # A copy: a process killed while it loads an operator leaves a lock that would stop every later one on this
        # machine.
        if Path(compiled_ops()).is_dir():
            shutil.copytree(compiled_ops(), self.folder / "torch_extensions", ignore=shutil.ignore_patterns("lock"))
        starting = [(host, self._launch_host(host)) for host in self.hosts]
        for host, process in starting:
            _wait_ready(process)
            host.init_pid = psutil.Process(process.pid).children()[0].pid
            self._connect(host)
        deadline = time.monotonic() + 60
        while any(host.port_is_free(22) for host in self.hosts):
            assert time.monotonic() < deadline, "sshd did not come up"
            time.sleep(0.01)

    def _launch(self, command: list[str], *, wait: bool = True, **options) -> subprocess.Popen:
        """A process that ends with this one, even after kill -9."""
        process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "--", *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            **options,
        )
        self._started.append(process)
        if wait:
            _wait_ready(process)
        return process

    def _launch_host(self, host: Host) -> subprocess.Popen:
        unshare = ["unshare", *NAMESPACES, "--fork", "--kill-child", "--mount-proc", "--", "bash", "-ec"]
        script = _set_up(host, [self.folder, *self.shared])
        return self._launch([*unshare, script], wait=False, env=host.environment, cwd="/")

    def _connect(self, host: Host) -> None:
        """A cable from the host's eth0 to the switch."""
        port = f"port-{host.name}"
        _run(f"ip link add eth0 netns {host.init_pid} type veth peer name {port} netns {host.switch_pid}".split())
        _run(f"nsenter --target {host.switch_pid} --net ip link set {port} master bridge up".split())
        script = f"ip link set lo up; ip address add {host.address}/24 dev eth0; ip link set eth0 up"
        _run(["nsenter", "--target", str(host.init_pid), "--net", "bash", "-ec", script])


def _set_up(host: Host, shared: list[Path]) -> str:
    """The script of a host's process 1, in its namespaces: own folders and files over the machine's, then sshd, which
    also reaps orphans.
    """
    own_tmp = host.folder / "tmp"
    below_tmp = sorted(
        path for path in {path.resolve() for path in shared} if path.is_relative_to("/tmp")
    )  # a folder before what lies in it
    lines = [f"hostname {host.name}"]
    for path in below_tmp:
        there = own_tmp / path.relative_to("/tmp")
        lines.append(f"mkdir -p '{there}' && mount --bind '{path}' '{there}'")
    lines += [
        f"mount --rbind '{own_tmp}' /tmp",
        "mount -t tmpfs -o size=2g tmpfs /dev/shm",
        "mount -t tmpfs tmpfs /run",
        "mkdir /run/sshd",
        f"mount --bind '{host.folder}/passwd' /etc/passwd",
        f"mount --bind '{host.etc_hosts}' /etc/hosts",
        "echo ready",
        f"exec /usr/sbin/sshd -D -e -f '{host.folder}/sshd_config' 2>'{host.folder}/sshd.log'",
    ]
    return "\n".join(lines)


def _write_files(folder: Path, hosts: list[Host]) -> None:
    """Keys, known_hosts, sshd's settings, /etc/hosts and /etc/passwd of all hosts. One key for all: each reaches each
    without a prompt.
    """
    for name in ("user_key", "host_key"):
        _run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "dsft-test", "-f", str(folder / name)])
    host_key = (folder / "host_key.pub").read_text()
    known = "".join(f"{host.name},{host.address} {host_key}" for host in hosts) + f"localhost,127.0.0.1 {host_key}"
    names = "127.0.0.1 localhost\n" + "".join(f"{host.address} {host.name}\n" for host in hosts)
    users = [line for line in Path("/etc/passwd").read_text().splitlines(keepends=True) if not line.startswith("root:")]
    shell = pwd.getpwuid(0).pw_shell
    for host in hosts:
        ssh = host.home / ".ssh"
        ssh.mkdir(parents=True, mode=0o700)
        (host.folder / "tmp").mkdir()
        (host.folder / "tmp").chmod(0o1777)
        shutil.copy(folder / "user_key", ssh / "id_ed25519")
        shutil.copy(folder / "user_key.pub", ssh / "authorized_keys")
        (ssh / "known_hosts").write_text(known)
        host.etc_hosts.write_text(names)
        (host.folder / "passwd").write_text(f"root:x:0:0:root:{host.home}:{shell}\n" + "".join(users))
        variables = " ".join(f'"{name}={value}"' for name, value in host.environment.items())
        (host.folder / "sshd_config").write_text(
            f"HostKey {folder}/host_key\nAuthorizedKeysFile .ssh/authorized_keys\nPidFile none\nUsePAM no\nStrictModes"
            f" no\nPermitRootLogin prohibit-password\nMaxStartups 100\nSetEnv {variables}\n"
        )


def _wait_ready(process: subprocess.Popen) -> None:
    line = process.stdout.readline()
    assert line == "ready\n", f"a test host did not start: exit code {process.wait()}"


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, f"{' '.join(command)}: {result.stderr}"


def _content(file) -> str:
    file.seek(0)
    return file.read()


def _pid_namespace(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return ""
