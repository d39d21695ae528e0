// Dark or light: what the system wants until somebody presses the button, then what was chosen.

const KEPT = "saccade-theme";

export function followTheme(button) {
  const system = matchMedia("(prefers-color-scheme: dark)");
  const current = () => localStorage.getItem(KEPT) ?? (system.matches ? "dark" : "light");
  const apply = () => {
    const other = current() === "dark" ? "light" : "dark";
    document.documentElement.dataset.theme = current();
    button.textContent = other === "dark" ? "☾" : "☀";
    button.ariaLabel = `Switch to ${other} colours`;
  };
  button.addEventListener("click", () => {
    localStorage.setItem(KEPT, current() === "dark" ? "light" : "dark");
    apply();
  });
  system.addEventListener("change", apply);
  apply();
}
