"""The files in deploy/: the shell and YAML are valid, the commands in them parse, and the documentation shows the same text."""

import argparse
import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from megabatch_train import cli
from megabatch_train.commands import find_command

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
PAGE = (ROOT / "docs" / "many_gpus.md").read_text()
tomllib = pytest.importorskip("tomllib", reason="Python 3.11 and newer read TOML")


def parse(words):
    """The arguments of `torchrun … -m megabatch COMMAND …`, by the parsers of both programs."""
    from torch.distributed.run import get_args_parser

    start = words.index("torchrun") + 1
    launched = get_args_parser().parse_args(words[start:])
    assert (launched.module, launched.training_script) == (True, "megabatch")
    name, *arguments = launched.training_script_args
    parser, subparser = cli._parser(name)
    find_command(name).add_arguments(subparser)
    return launched, parser.parse_args([name, *arguments])


def test_the_slurm_job():
    text = (DEPLOY / "slurm.sh").read_text()
    assert text.startswith("#!/bin/bash\n#SBATCH ")
    if bash := shutil.which("bash"):
        subprocess.run([bash, "-n", DEPLOY / "slurm.sh"], check=True)
    call = re.search(r"^srun (torchrun .*)", text.replace("\\\n", " "), re.MULTILINE)
    words = shlex.split(call[1].replace("$SLURM_NNODES", "4").replace("$SLURM_JOB_ID", "7").replace("$first", "node"))
    launched, args = parse(words)
    assert (launched.nnodes, launched.nproc_per_node, launched.rdzv_endpoint) == ("4", "8", "node:29500")
    assert isinstance(args, argparse.Namespace)
    assert (str(args.resume), str(args.output)) == ("auto", "runs/mine")
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", text, re.MULTILINE))
    assert (asked["nodes"], asked["gpus-per-node"], asked["signal"]) == (launched.nnodes, launched.nproc_per_node, "TERM@120")


def test_the_kubernetes_job():
    yaml = pytest.importorskip("yaml")
    service, job = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    assert (service["kind"], job["kind"], job["apiVersion"]) == ("Service", "Job", "batch/v1")
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    launched, args = parse([*container["command"], *container["args"]])
    assert launched.nnodes == str(job["spec"]["completions"]) == str(job["spec"]["parallelism"])
    assert int(launched.nproc_per_node) == container["resources"]["limits"]["nvidia.com/gpu"]
    host, domain = launched.rdzv_endpoint.split(":")[0].split(".")
    assert (host, domain) == (f"{job['metadata']['name']}-0", service["metadata"]["name"])
    assert pod["subdomain"] == domain
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    places = [mount["mountPath"] for mount in container["volumeMounts"]]
    assert all(any(str(path).startswith(place) for place in places) for path in (args.config, args.output))


def test_the_container():
    text = (DEPLOY / "Dockerfile").read_text()
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line and not line.startswith("#")]
    words = {"ARG", "FROM", "RUN", "COPY", "WORKDIR", "ENTRYPOINT", "CMD"}
    assert {line.split()[0] for line in lines} == words
    assert re.search(
        r"^ARG BASE=pytorch/pytorch:2\.([89]|\d\d)\.\d-cuda[\d.]+-cudnn9-runtime\nFROM \$\{BASE\}$", text, re.MULTILINE
    )
    for line in lines:
        kind, _, rest = line.partition(" ")
        if kind == "COPY":
            *sources, target = rest.split()
            assert all((ROOT / source).exists() for source in sources)
            assert target.startswith("/opt/megabatch")
        elif kind in ("ENTRYPOINT", "CMD"):
            assert isinstance(json.loads(rest), list)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (extras,) = re.findall(r'"/opt/megabatch\[([\w,-]+)\]"', text)
    assert set(extras.split(",")) <= set(project["project"]["optional-dependencies"])
    (entry,) = json.loads(lines[-2].partition(" ")[2])
    assert entry in project["project"]["scripts"]


@pytest.mark.parametrize("name", ["slurm.sh", "kubernetes.yaml"])
def test_the_page_shows_the_file(name):
    assert f"```{'bash' if name.endswith('.sh') else 'yaml'}\n{(DEPLOY / name).read_text()}```" in PAGE
    assert f"deploy/{name}" in PAGE
