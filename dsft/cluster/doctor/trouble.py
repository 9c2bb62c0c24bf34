"""Why a conversation with a node broke, as a finding with the command that mends it: from the words of ssh, the shell
and Python.
"""

import os
import shlex
import sys

from dsft.cluster.doctor.findings import Finding, finding


def broken_session(node: str, text: str, exit_code: int | None) -> Finding:
    """The finding for a session whose last words were `text`."""
    here, python = shlex.quote(os.getcwd()), shlex.quote(sys.executable)
    last = (text.splitlines() or [""])[-1][:300]
    if "Could not resolve hostname" in text:
        return finding(
            "unknown-host",
            node,
            f"the name {node} does not resolve here ({last})",
            f"correct the host file, or add the address: echo 'ADDRESS {node}' >> /etc/hosts",
        )
    if "Connection refused" in text:
        return finding(
            "ssh-refused",
            node,
            f"nothing listens for ssh there ({last})",
            f"on {node}: systemctl start ssh; another port goes into ~/.ssh/config (Host {node}, Port N)",
        )
    if "REMOTE HOST IDENTIFICATION HAS CHANGED" in text:
        return finding(
            "ssh-host-key",
            node,
            "the host's key is another than the known one",
            f"if the host was set up anew: ssh-keygen -R {node} && ssh-keyscan -H {node} >> ~/.ssh/known_hosts",
        )
    if "Host key verification failed" in text:
        return finding(
            "ssh-host-key", node, "the host's key is not known here", f"ssh-keyscan -H {node} >> ~/.ssh/known_hosts"
        )
    if "Permission denied" in text:
        return finding(
            "ssh-password",
            node,
            f"ssh does not get in without a prompt ({last})",
            f"ssh-copy-id {node} (first ssh-keygen -t ed25519, where there is no key)",
        )
    if any(words in text for words in ("timed out", "No route to host", "Network is unreachable", "not responding")):
        return finding(
            "host-unreachable",
            node,
            f"the host does not answer ({last})",
            f"ping {node}; is it up, is its address right, does a firewall drop port 22?",
        )
    if "cd:" in text and ("No such file" in text or "can't cd" in text or "not a directory" in text.lower()):
        return finding(
            "no-folder",
            node,
            f"the folder {os.getcwd()} is not there",
            f"mount it on {node}, or copy it: rsync -a {here}/ {node}:{here}/",
        )
    if "No module named 'dsft" in text or "No module named dsft" in text:
        return finding(
            "no-dsft",
            node,
            f"Python there does not find this dsft ({last})",
            f"rsync -a {here}/ {node}:{here}/, or on {node}: {python} -m pip install -e {here}",
        )
    if "No module named" in text:
        return finding(
            "package-missing", node, last, f"on {node}: {python} -m pip install -c constraints.txt -e {here}"
        )
    if exit_code in (126, 127) or (sys.executable in text and "No such file" in text):
        return finding(
            "no-python",
            node,
            f"there is no {sys.executable}",
            f"create the same environment at the same path on {node}, or mount it there",
        )
    if text.startswith("no answer to"):
        return finding(
            "node-silent",
            node,
            text,
            f"ssh {node} uptime; a full disk, a hanging mount or a load far beyond its cores look like this",
        )
    return finding("ssh-failed", node, last or f"exit code {exit_code}", f"ssh -v {node} true")
