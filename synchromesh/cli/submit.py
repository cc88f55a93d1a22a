"""`synchromesh submit`: files that start an elastic run on a cluster, from the run's own words."""

import argparse
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from synchromesh.cli import options
from synchromesh.cli.command import command, either, option
from synchromesh.cli.elastic import hosts

SLURM = """#!/bin/bash
# written by `synchromesh submit`; start it with: sbatch {file}
#SBATCH --job-name={name}
#SBATCH --nodes={least}-{most}
#SBATCH --ntasks-per-node=1
#SBATCH --no-kill
set -eu
# the first node decides; the job goes on where another one fails, and ends with it
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=$(srun --nodes=1 --ntasks=1 --nodelist="$first" getent ahostsv4 "$first" | \\
    awk '{{print $1; exit}}')
exec srun --no-kill --kill-on-bad-exit=0 synchromesh {command} \\
    --coordinator "$address:{port}" --token-file {token} {words}
"""


def main(args: argparse.Namespace) -> int:
    words = args.arguments[args.arguments[:1] == ["--"] :]
    _check(args, words)
    try:
        least, most = hosts(words[words.index("--elastic") + 1])
    except argparse.ArgumentTypeError as error:
        raise ValueError(f"--elastic {error}") from None
    if args.slurm:
        path, text = Path(args.slurm), _slurm(args, words, least, most)
    else:
        path = Path(args.kubernetes)
        text = yaml.safe_dump_all(_kubernetes(args, words, most), sort_keys=False)
    path.write_text(text)
    how = "sbatch" if args.slurm else "kubectl apply -f"
    print(f"synchromesh: start it with: {how} {path}", file=sys.stderr)
    return _tried(path) if args.slurm else 0


def _check(args: argparse.Namespace, words: Sequence[str]) -> None:
    if words[:1] == ["run"]:  # what comes behind the script is its own
        words = words[: next((n for n, word in enumerate(words) if word.endswith(".py")), None)]
    if words[:1] not in (["train"], ["run"]) or "--elastic" not in words[:-1]:
        raise ValueError(
            "submit takes an elastic run's own words: synchromesh submit --slurm FILE -- train "
            "digits/cnn --elastic 2:4"
        )
    if not (args.slurm or args.kubernetes):
        raise ValueError("submit needs to know for what: give --slurm FILE or --kubernetes FILE")
    if added := [w for w in ("--coordinator", "--token-file", "--interface") if w in words]:
        raise ValueError(f"submit says {' and '.join(added)} itself: leave it out of the run's")
    if args.kubernetes and not args.image:
        raise ValueError("--kubernetes needs --image, which has synchromesh and the run's files")


def _slurm(args: argparse.Namespace, words: Sequence[str], least: int, most: int) -> str:
    token = shlex.quote(str(Path(args.token_file).resolve()))
    return SLURM.format(
        file=args.slurm,
        name=args.name,
        least=least,
        most=most,
        command=words[0],
        words=shlex.join(words[1:]),
        token=token,
        port=args.port,
    )


def _tried(path: Path) -> int:
    """Whether Slurm would take it, where there is one."""
    if shutil.which("sbatch") is None:
        return 0
    return subprocess.run(["sbatch", "--test-only", str(path)], check=False).returncode


def _kubernetes(args: argparse.Namespace, words: Sequence[str], most: int) -> list[dict[str, Any]]:
    """A headless service, by which pods find the first one, a job of so many, and who may speak to
    them. The token is in a secret."""
    name, label = args.name, {"run": args.name}
    own = ["--coordinator", f"{name}-0.{name}:{args.port}", "--token-file", "/token/token"]
    container = {
        "name": name, "image": args.image, "command": ["synchromesh", words[0], *own, *words[1:]],
        "volumeMounts": [{"name": "token", "mountPath": "/token", "readOnly": True}],
    }  # fmt: skip
    secret = {"secretName": f"{name}-token", "defaultMode": 0o400}
    pod = {
        "subdomain": name, "restartPolicy": "Never", "containers": [container],
        "volumes": [{"name": "token", "secret": secret}],
    }  # fmt: skip
    job = {
        "completions": most, "parallelism": most, "completionMode": "Indexed",
        "backoffLimitPerIndex": 8, "template": {"metadata": {"labels": label}, "spec": pod},
    }  # fmt: skip
    service = {"clusterIP": "None", "selector": label, "publishNotReadyAddresses": True}
    among = {"from": [{"podSelector": {"matchLabels": label}}]}
    policy = {
        "podSelector": {"matchLabels": label},
        "policyTypes": ["Ingress"],
        "ingress": [among],
    }
    kinds = {
        ("v1", "Service"): service, ("networking.k8s.io/v1", "NetworkPolicy"): policy,
        ("batch/v1", "Job"): job,
    }  # fmt: skip
    return [
        {"apiVersion": version, "kind": kind, "metadata": {"name": name}, "spec": spec}
        for (version, kind), spec in kinds.items()
    ]


COMMAND = command(
    "submit", main, "writes what starts an elastic run on Slurm or Kubernetes",
    "Writes a batch script for Slurm, or objects for Kubernetes, that start an elastic run on as "
    "many hosts as it takes at most: synchromesh submit --slurm FILE -- train digits/cnn "
    "--elastic 2:4. On Kubernetes the token is that of the secret NAME-token, key `token`.",
    either(
        option("--slurm", metavar="FILE", help="a batch script, tried where there is `sbatch`"),
        option("--kubernetes", metavar="FILE", help="a service, a network policy and a job"),
    ),
    option("--token-file", default="token", metavar="FILE", help="on Slurm: that all nodes see"),
    option("--port", type=options.port, default=7400, help="of the coordinator; default 7400"),
    option("--image", help="for Kubernetes: of a container with synchromesh and the run's files"),
    option("--name", default="synchromesh", help="of the job"),
    option("arguments", nargs=argparse.REMAINDER, metavar="-- train ...", help="the run"),
)  # fmt: skip
