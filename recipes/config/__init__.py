"""The run's configuration: dataclasses, ds_config files, errors."""
