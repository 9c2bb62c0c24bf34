"""The files of examples/: syntax, and commands that `dsft` takes. No image is built and no cluster started."""

import re
import shlex
import tomllib

import yaml
from conftest import ROOT

from dsft.config.reader import read_flags

EXAMPLES = ROOT / "examples"
INSTRUCTIONS = "ARG CMD COPY ENTRYPOINT ENV FROM RUN WORKDIR"


def check_training(words: list[str]) -> None:
    """torchrun starts the training, which takes the words after it."""
    at = words.index("--module")
    assert words[at + 1] == "dsft.train"
    flags, _ = read_flags(words[at + 2 :])
    assert flags.keys() == {"config", "resume_from_checkpoint"}


def test_the_dockerfile_has_known_instructions_and_copies_what_is_there():
    lines = re.sub(r"^\s*#.*\n", "", (EXAMPLES / "Dockerfile").read_text(), flags=re.MULTILINE)
    instructions = [line.split(maxsplit=1) for line in re.sub(r"\\\n", " ", lines).splitlines() if line.strip()]
    assert {name for name, _ in instructions} <= set(INSTRUCTIONS.split())
    assert [name for name, _ in instructions if name in ("FROM", "ENTRYPOINT", "CMD")] == ["FROM", "ENTRYPOINT", "CMD"]
    copied: set[str] = set()
    for name, value in instructions:
        if name == "COPY":
            *sources, target = shlex.split(value)
            assert sources and target and all((ROOT / source).exists() for source in sources), value
            copied |= set(sources)
        elif name in ("ENTRYPOINT", "CMD"):
            assert isinstance(yaml.safe_load(value), list)
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = [*wheel["packages"], *wheel["force-include"], *wheel["shared-data"], "hatch_build.py", "README.md"]
    assert {name.split("/")[0] for name in needed} <= copied


def test_the_kubernetes_example_is_a_job_whose_pods_find_each_other():
    service, job = yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    environment = {variable["name"]: variable.get("value") for variable in container["env"]}
    assert container["command"] == ["torchrun"]
    assert (service["kind"], job["kind"], job["spec"]["completionMode"]) == ("Service", "Job", "Indexed")
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert f"--master_addr={job['metadata']['name']}-0.{service['metadata']['name']}" in container["args"]
    assert pod["subdomain"] == service["metadata"]["name"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    nodes = job["spec"]["completions"]
    assert nodes == job["spec"]["parallelism"] and f"--nnodes={nodes}" in container["args"]
    assert "--node_rank=$(JOB_COMPLETION_INDEX)" in container["args"] and "JOB_COMPLETION_INDEX" in environment
    check_training(container["args"])


def test_the_skypilot_example_launches_on_its_nodes():
    task = yaml.safe_load((EXAMPLES / "skypilot.yaml").read_text())
    values = {"NUM_NODES": task["num_nodes"], "NODE_RANK": 1, "NUM_GPUS_PER_NODE": 8}
    text = task["run"].replace("\\\n", " ").replace("$CONFIG", "run.yaml")
    for name, value in values.items():
        text = text.replace(f"$SKYPILOT_{name}", str(value))
    (line,) = (line for line in text.splitlines() if line.strip().startswith("torchrun"))
    words = shlex.split(line)
    assert words[words.index("--nnodes") + 1] == str(task["num_nodes"])
    check_training(words)
    assert (ROOT / task["workdir"]).is_dir() and set(task["envs"]) == {"CONFIG"}
    assert (ROOT / re.search(r"scripts/\w+", task["setup"])[0]).is_file()
