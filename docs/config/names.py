"""Lets the reference find functions that their package exports under the name of the module that they are in.

`curvature.plots.training` is a function; read without running it, the package has only the module of that name.
"""

from griffe import Alias, Extension, Module


class ExportedFunctions(Extension):
    def on_package(self, *, pkg: Module, **_: object) -> None:
        for package in [pkg, *pkg.modules.values()]:
            names = [str(name) for name in package.exports or ()]
            members = {name: package.members.get(name) for name in names}
            for member in members.values():  # their paths go through the modules that are replaced below
                if isinstance(member, Alias) and member.target_path.startswith(f"{package.path}."):
                    member.resolve_target()
            for name, member in members.items():
                if isinstance(member, Module) and name in member.members:
                    package.set_member(name, Alias(name, member.members[name], parent=package))
