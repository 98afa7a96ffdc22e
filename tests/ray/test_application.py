"""The application as Ray Serve reads it from a file; nothing is started."""

from pathlib import Path

import pydantic
import pytest
import yaml
from ray import serve
from ray.serve.schema import ServeDeploySchema

from paged_kv.errors import ContractError
from paged_kv.ray import Arguments, app
from paged_kv.ray.replica import settings_of

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
    for name in ("replica", "lora"):
        with pytest.raises(pydantic.ValidationError, match=rf"{name}\n.*Extra inputs"):
            app({"model": "demo", name: "a=b"})
    with pytest.raises(
        pydantic.ValidationError, match="expected fields of Ray Serve's autoscaling_config, got max_replica"
    ):
        app({"model": "demo", "autoscaling": {"min_replicas": 1, "max_replica": 1}})
    with pytest.raises(
        ContractError, match=r"--kv-disk-gb: expected a number above 0 and below 10\^9, got 2000000000.0"
    ):
        app({"model": "demo", "kv_disk": "kv", "kv_disk_gb": 2e9})


def test_options_of_the_server_and_of_the_replicas_come_from_one_list():
    """Given as texts, as `serve run` gives them."""
    given = {"speculate": "draft", "kv_disk": "kv", "kv_disk_gb": "3", "cache_dtype": "int4"}
    given |= {"cache_rotation": "hadamard", "max_running": "9", "max_gap": "0.5", "num_pages": "40", "model": "m"}
    arguments = Arguments.model_validate(
        given | {"generation_config": "none", "allowed_hosts": ["a"], "strict": "true"}
    )
    settings = arguments.settings
    for told in (settings, settings_of(arguments.each, model=Path("m"), name="m", pages=40)):
        assert (told.model, told.pages, told.speculate, told.kv_disk, told.kv_disk_gb) == (
            *(Path("m"), 40, "draft", Path("kv"), 3.0),
        )
        assert (told.cache_dtype, told.cache_rotation) == ("int4", "hadamard")
        assert (told.max_running, told.max_gap) == (9, 0.5)
    assert (settings.generation_config, settings.allowed_hosts, settings.host) == ("none", ("a",), "127.0.0.1")
    assert settings.strict
