"""Lets the reference find functions that their package exports under the name of the module that they are in.

`curvature.plots.training` is a function; read without running it, the package has only the module of that name.
"""

from griffe import Alias, Extension, Module


class ExportedFunctions(Extension):
    def on_package(self, *, pkg: Module, **_: object) -> None:
        for package in [pkg, *pkg.modules.values()]:
            for name in package.exports or ():
                member = package.members.get(str(name))
                if isinstance(member, Module) and name in member.members:
                    package.set_member(str(name), Alias(str(name), member.members[name], parent=package))
