from __future__ import annotations

import argparse
import json

from ..config import json_schema


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "The one in the repository: ds_sparse schema > configs/sparse_attention.schema.json"


def run(args: argparse.Namespace) -> int:
    print(json.dumps(json_schema(), indent=2))
    return 0
