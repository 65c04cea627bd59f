#!/bin/bash
#SBATCH --job-name={{ name }}
#SBATCH --nodes={{ nodes }}
#SBATCH --ntasks-per-node={{ local }}
{%- if gpus %}
#SBATCH --gpus-per-node={{ gpus }}
{%- endif %}
#SBATCH --cpus-per-task={{ cpus }}
#SBATCH --time={{ time_limit }}
#SBATCH --signal=TERM@{{ save_seconds }}
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log

# srun starts one lorakit per process and gives each its rank; lorakit finds the rest in Slurm's variables.
# Two minutes before the time limit the tasks (not this script) get SIGTERM: they save and exit with 75.
export OMP_NUM_THREADS="$SLURM_CPUS_PER_TASK"
srun --kill-on-bad-exit=1 --distribution=block --cpus-per-task="$SLURM_CPUS_PER_TASK"{% if gpus %} --gpu-bind=none{% endif %} {{ shell_command }}
code=$?

# 75 is "try again later": queue again, the same command goes on from the last checkpoint.
if [ "$code" -eq 75 ] && [ "${SLURM_RESTART_COUNT:-0}" -lt {{ max_starts }} ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
