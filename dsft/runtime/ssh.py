"""Commands on other hosts through ssh, and why one broke off: what ssh, the shell there and Python print, as a problem
with the command that helps.
"""

import os
import shlex
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass

from dsft.runtime.versions import code_folder

OPTIONS = ("BatchMode=yes", "ConnectTimeout=5", "ServerAliveInterval=3", "ServerAliveCountMax=3")
SSH = ["ssh", *(word for option in OPTIONS for word in ("-o", option))]


def ssh_command(host: str, words: list[str], variables: dict[str, str]) -> list[str]:
    """A command on a host, in this folder and with these variables."""
    exports = "".join(f"export {name}={shlex.quote(value)}; " for name, value in variables.items())
    return [*SSH, host, f"{exports}cd {shlex.quote(os.getcwd())} && exec {shlex.join(words)}"]


@dataclass(frozen=True)
class SshProblem:
    """Why a command on a node broke off."""

    code: str  # of the doctor's finding (docs/doctor.md)
    node: str
    message: str
    fix: str


def ssh_problem(node: str, text: str, exit_code: int | None, *, banner: str = "") -> SshProblem:
    """Why a command on a node broke off, from the last words of ssh, the shell or Python; and, where ssh got no answer
    in time, from what its server says in one small packet (`banner`, by default asked for here).
    """
    banner = banner or (ssh_banner(node) if "timed out" in text else "")
    python = shlex.quote(sys.executable)
    values = {
        "node": node,
        "last": (text.splitlines() or [""])[-1][:300],
        "folder": shlex.quote(os.getcwd()),
        "code": shlex.quote(str(code_folder())),
        "python": sys.executable,
        "install": f"on {node}: {python} -m pip install",
    }
    if banner:
        message = f"port 22 answers ({banner}), but ssh gets no further: small packets arrive, large ones do not (MTU)"
        fix = (
            f"ping -M do -s 1472 {node}, and with less until it answers: that and 28 bytes are the MTU of the way;"
            " then on both ends: ip link set dev INTERFACE mtu THAT"
        )
        return SshProblem("mtu-path", node, message, fix)
    in_folder = "cd:" in text and any(words in text for words in ("No such file", "can't cd", "ot a directory"))
    for code, words, message, fix in SSH_ERRORS:
        if any(word in text for word in words) and (code != "no-folder" or in_folder):
            return SshProblem(code, node, message.format(**values), fix.format(**values))
    if exit_code in (126, 127) or (sys.executable in text and "No such file" in text):
        fix = f"create the same environment at the same path on {node}, or mount it there"
        return SshProblem("no-python", node, f"there is no {sys.executable}", fix)
    if text.startswith("no answer to"):
        fix = f"ssh {node} uptime; a full disk, a hanging mount or a load far beyond its cores look like this"
        return SshProblem("node-silent", node, text, fix)
    return SshProblem("ssh-failed", node, values["last"] or f"exit code {exit_code}", f"ssh -v {node} true")


def ssh_banner(node: str) -> str:
    """What the ssh server at a node's port 22 says first, in one small packet; empty where nothing comes."""
    with suppress(OSError), socket.create_connection((node, 22), timeout=3) as connection:
        connection.settimeout(3)
        return connection.recv(64).decode(errors="replace").strip()
    return ""


SSH_ERRORS = (
    (
        "unknown-host",
        ("Could not resolve hostname",),
        "the name {node} does not resolve here ({last})",
        "correct the host file, or add the address: echo 'ADDRESS {node}' >> /etc/hosts",
    ),
    (
        "ssh-refused",
        ("Connection refused",),
        "nothing listens for ssh there ({last})",
        "on {node}: systemctl start ssh; another port goes into ~/.ssh/config (Host {node}, Port N)",
    ),
    (
        "ssh-host-key",
        ("REMOTE HOST IDENTIFICATION HAS CHANGED",),
        "the host's key is another than the known one",
        "if the host was set up anew: ssh-keygen -R {node} && ssh-keyscan -H {node} >> ~/.ssh/known_hosts",
    ),
    (
        "ssh-host-key",
        ("Host key verification failed",),
        "the host's key is not known here",
        "ssh-keyscan -H {node} >> ~/.ssh/known_hosts",
    ),
    (
        "ssh-password",
        ("Permission denied",),
        "ssh does not get in without a prompt ({last})",
        "ssh-copy-id {node} (first ssh-keygen -t ed25519, where there is no key)",
    ),
    (
        "host-unreachable",
        ("timed out", "No route to host", "Network is unreachable", "not responding"),
        "the host does not answer ({last})",
        "ping {node}; is it up, is its address right, does a firewall drop port 22?",
    ),
    (
        "no-folder",
        ("cd:",),
        "the folder {folder} is not there",
        "mount it on {node}, or copy it: rsync -a {folder}/ {node}:{folder}/",
    ),
    (
        "no-dsft",
        ("No module named 'dsft", "No module named dsft"),
        "Python there does not find this dsft ({last})",
        "rsync -a {code}/ {node}:{code}/, or {install} -e {code}",
    ),
    ("package-missing", ("No module named",), "{last}", "{install} -c constraints.txt -e {code}"),
)
"""(code, what ssh, the shell or Python say, message, command that helps): the first that fits."""
