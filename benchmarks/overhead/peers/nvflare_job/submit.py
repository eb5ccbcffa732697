"""Submits federated averaging over numpy arrays as a job, and waits for its end.

    python submit.py ADMIN_KIT FIRST_WEIGHTS.npy DEVICES ROUNDS
"""

import sys
from pathlib import Path

from nvflare.app_common.np.recipes import NumpyFedAvgRecipe
from nvflare.recipe import ProdEnv


def main(kit: str, weights: str, devices: str, rounds: str) -> None:
    recipe = NumpyFedAvgRecipe(
        name="overhead", initial_ckpt=weights, min_clients=int(devices), num_rounds=int(rounds),
        train_script=str(Path(__file__).with_name("client.py")),
    )
    run = recipe.execute(ProdEnv(startup_kit_location=kit, username="admin@bench.org", login_timeout=30.0))
    print("submitted", run.get_job_id(), flush=True)
    print("result", run.get_result(), flush=True)
    print("status", run.get_status(), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
