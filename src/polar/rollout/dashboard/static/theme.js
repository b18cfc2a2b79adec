// Light or dark: as the system says, until somebody says otherwise.

const KEY = "polar-theme";

export function setUpTheme(button) {
  const system = matchMedia("(prefers-color-scheme: dark)");
  const current = () => localStorage.getItem(KEY) ?? (system.matches ? "dark" : "light");
  const apply = () => {
    const other = current() === "dark" ? "light" : "dark";
    document.documentElement.dataset.theme = current();
    button.textContent = other === "dark" ? "Dark" : "Light";
    button.setAttribute("aria-label", `Change to the ${other} theme`);
  };
  button.addEventListener("click", () => {
    localStorage.setItem(KEY, current() === "dark" ? "light" : "dark");
    apply();
  });
  system.addEventListener("change", apply);
  apply();
}
