// Loads MathJax, which lies beside this file, on pages with formulas.
window.MathJax = {
  tex: {
    inlineMath: [["\\(", "\\)"]],
    displayMath: [["\\[", "\\]"]],
    packages: { "[-]": ["autoload", "noundefined", "require"] }, // what is unknown is an error
  },
  options: { enableMenu: false, ignoreHtmlClass: ".*|", processHtmlClass: "arithmatex" },
};
if (document.querySelector(".arithmatex")) {
  const script = document.createElement("script");
  script.src = new URL("mathjax.js", document.currentScript.src);
  document.head.append(script);
}
