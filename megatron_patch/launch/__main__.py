"""Entry for ``examples/_lib.sh``, and ``env`` to see what is detected."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from megatron_patch.launch.flags import help_text, split_flags
from megatron_patch.launch.mpi import help_text as mpi_help_text
from megatron_patch.launch.mpi import run_mpi
from megatron_patch.launch.node import Call, run
from megatron_patch.launch.world import detect, probe
from megatron_patch.training import legacy
from megatron_patch.util import UserError


def main(argv: list[str] | None = None) -> int:
    """Entry for ``examples/_lib.sh``, and ``env [--json] [flags]`` to see what is detected."""
    arguments = sys.argv[1:] if argv is None else argv
    try:
        if arguments and arguments[0] == "env":
            as_json = "--json" in arguments
            options, rest = split_flags([a for a in arguments[1:] if a != "--json"])
            if rest:
                raise UserError(f"env: {rest[0]} is not a launcher flag")
            world = detect(os.environ, options, probe(os.environ))
            print(json.dumps(asdict(world)) if as_json else world.line())
            return 0
        if len(arguments) == 3 and arguments[0] in ("help-run", "help-mpi"):
            name, everything = Path(arguments[1]).name, "all" in arguments[2]
            mpi = arguments[0] == "help-mpi" and not everything
            print(mpi_help_text(name) if mpi else help_text(name, everything=everything), end="")
            return 0
        if len(arguments) < 4 or arguments[0] not in ("run", "mpi"):
            raise UserError("usage: python -m megatron_patch.launch env [--json] [launcher flags]")
        count = int(arguments[3])
        call = Call(
            entry=arguments[1],
            script=arguments[2],
            defaults=tuple(arguments[4 : 4 + count]),
            user=tuple(arguments[4 + count :]),
        )
        for note in legacy.unread(os.environ):
            print(f"note: {note}", flush=True)
        return run(call) if arguments[0] == "run" else run_mpi(call)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
