"""Rules of every kind of component: resources, settings of the process, close, inputs."""
