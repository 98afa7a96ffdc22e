"""Options of `paged-kv serve` that may be repeated, on the command line and in a file."""

import pytest

from paged_kv.commands.serve import serve_command
from paged_kv.serve import launch


@pytest.mark.parametrize(
    ("arguments", "file", "names", "hosts"),
    [
        ([], "", ("demo",), ()),
        (["--name", "a", "--name", "b/c"], "", ("a", "b/c"), ()),
        ([], 'name = "abc"\nallowed-host = "a.example"', ("abc",), ("a.example",)),
        ([], 'name = ["abc", "d"]\nallowed-host = ["a", "b"]', ("abc", "d"), ("a", "b")),
        (["--name", "e"], 'name = ["abc", "d"]', ("e",), ()),
    ],
)
def test_a_text_in_a_file_is_one_of_what_may_be_repeated(monkeypatch, tmp_path, arguments, file, names, hosts):
    settings = []
    monkeypatch.setattr(launch, "serve", settings.append)
    (tmp_path / "c.toml").write_text(file)
    serve_command.main([*arguments, "--demo", "--config", str(tmp_path / "c.toml")], standalone_mode=False)
    (made,) = settings
    assert (made.name, *made.aliases) == names
    assert made.allowed_hosts == hosts
