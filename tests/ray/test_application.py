"""The application as Ray Serve reads it from a file; nothing is started."""

from pathlib import Path

import pydantic
import pytest
import yaml
from ray import serve
from ray.serve.schema import ServeDeploySchema

from paged_kv.ray import app

EXAMPLES = Path(__file__).parents[2] / "examples" / "ray_serve"


@pytest.mark.parametrize(("file", "amount"), [("demo.yaml", 2), ("autoscaling.yaml", None)])
def test_the_examples_are_what_serve_run_takes(file, amount):
    config = ServeDeploySchema.model_validate(yaml.safe_load((EXAMPLES / file).read_text()))
    (application,) = config.applications
    assert application.import_path == "paged_kv.ray:app"
    ingress = app(application.args)
    assert isinstance(ingress, serve.Application)
    arguments, replica = ingress._bound_deployment.init_args
    deployment = replica._bound_deployment
    assert deployment.ray_actor_options["num_cpus"] == arguments.cpus
    assert deployment.num_replicas == (amount or arguments.autoscaling["min_replicas"])
    scaling = deployment._deployment_config.autoscaling_config
    assert (scaling and scaling.max_replicas) == (arguments.autoscaling and arguments.autoscaling["max_replicas"])


def test_what_is_wrong_with_an_argument_is_said():
    with pytest.raises(pydantic.ValidationError, match=r"replica\n.*Extra inputs"):
        app({"model": "demo", "replica": 2})
    with pytest.raises(pydantic.ValidationError, match="max_replica is no field"):
        app({"model": "demo", "autoscaling": {"min_replicas": 1, "max_replica": 1}})
