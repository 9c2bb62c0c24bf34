"""What a shell offers after Tab, asked of the shell itself."""

import shutil
import subprocess

import pytest
from ranks import run_entry

pytest.importorskip("shtab", reason="scripts/install has not been run since it is needed")

OFFERED = {
    ("tr",): "train",
    ("comp",): "compare completion",
    ("train", "--meth"): "--method",
    ("train", "--method", ""): "full lora qlora",
    ("train", "--learning_r"): "--learning_rates --learning_rate",  # of transformers.TrainingArguments
    ("train", "--packing", ""): "true false",
    ("train", "--config", "r"): "run.yaml",
    ("eval", "--mode", ""): "auto windows sliding rolling answers",
    ("eval", "--protocol", ""): "gptq gptq-ptb-new gptq-c4-new llama.cpp lm-eval lm-eval-wikitext-2.0 hf dsft all",
    ("plan", "--packi"): "--packing",  # of the run that is planned
    ("launch", "--hostfile", "h", "train", "--seq_l"): "--seq_len",
    ("verify", "r"): "run.yaml",
}
ASK_BASH = """
source ./dsft.sh
for line in "$@"; do
    IFS=, read -r -a COMP_WORDS <<< "dsft,$line"
    [[ $line == *, ]] && COMP_WORDS+=("")
    COMP_CWORD=$((${#COMP_WORDS[@]} - 1)) COMPREPLY=()
    _shtab_dsft dsft "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
    echo "${COMPREPLY[*]}"
done
"""


def test_bash_completes_commands_options_values_and_files(tmp_path):
    result = run_entry("dsft.cli.main", ["completion", "bash"])
    assert result.returncode == 0, result.stderr
    (tmp_path / "dsft.sh").write_text(result.stdout)
    (tmp_path / "run.yaml").touch()
    lines = [",".join(words) for words in OFFERED]
    asked = subprocess.run(
        ["bash", "-c", ASK_BASH, "bash", *lines], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert dict(zip(OFFERED, asked.stdout.splitlines(), strict=True)) == OFFERED, asked.stderr


@pytest.mark.exhaustive
@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_read_their_script(shell, tmp_path):
    if not shutil.which(shell):
        pytest.skip(f"{shell} is not installed")
    result = run_entry("dsft.cli.main", ["completion", shell])
    script = tmp_path / "dsft.sh"
    script.write_text(result.stdout)
    subprocess.run([shell, "-n", script], check=True)
    if shell == "fish":
        asked = subprocess.run(
            ["fish", "-c", "source ./dsft.sh; complete -C 'dsft train --method '"],
            cwd=tmp_path, capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert [line.split("\t")[0] for line in asked.stdout.splitlines()] == ["full", "lora", "qlora"]
