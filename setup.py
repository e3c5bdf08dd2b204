"""Packaging for privfl; every value comes from settings.ini."""
from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup

settings = ConfigParser(delimiters=["="])
settings.read("settings.ini", encoding="utf-8")
config = settings["DEFAULT"]

setup(
    name=config["lib_name"],
    version=config["version"],
    description=config["description"],
    long_description=Path("README.md").read_text(encoding="utf-8") if Path("README.md").exists() else "",
    long_description_content_type="text/markdown",
    author=config["author"],
    author_email=config["author_email"],
    url=config["git_url"],
    license="Apache-2.0",
    keywords=config["keywords"],
    python_requires=f">={config['min_python']},<3.14",
    packages=find_packages(include=["privfl", "privfl.*"]),
    include_package_data=True,
    package_data={"privfl": ["py.typed", "assets/*"]},
    install_requires=config["requirements"].split(),
    extras_require={"dev": config["dev_requirements"].split(), "sionna": config["sionna_requirements"].split()},
    entry_points={
        "nbdev": [f"{config['lib_name']}={config['lib_name']}._modidx:d"],
        "console_scripts": config["console_scripts"].split(),
    },
    zip_safe=False,
)
