"""Where am I, how many of us are there, and what is to be run: the launchers' logic.

``examples/_lib.sh`` hands a launcher's defaults and the user's flags over; from there

* ``flags``    separates the launcher's own flags from those of training,
* ``world``    detects the environment (single node, torchrun, DLC, Slurm, MPI) as a pure function
  of the process environment, the flags and a probe of the machine,
* ``process``  builds this node's command line and runs it under a text log,
* ``node``     is one call of a launcher on one node: check, announce, run or show; the demo,
* ``mpi``      starts that on every node through ``mpirun``.

Standard library only, so that help, refusals and dry runs answer at once, anywhere.
"""
