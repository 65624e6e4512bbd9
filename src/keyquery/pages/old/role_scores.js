// Roles of heads, on the pages of a look and of roles alone: names, colours, metrics, and the scores of one head.
// A head's scores are lists by role: [data, score, low, high, null], first those on the data that decides on the role.

const ROLES = "roles";  // group of these metrics
const roleName = (role) => (role ? role.replaceAll("_", "-") : "none");
const roleTone = (role) => (role ? `var(--role-${role})` : "var(--line)");
const rolesNamed = (one) => (one.roles?.named ?? []).map(roleName).join(", ") || "none";
const roleScore = (one, role, data) => one.roles?.scores[role]?.find(([on]) => on === data) ?? null;

// The role of each head as a colour, and each score: key, label, value and ends of its interval, as other metrics.
function roleMeasures(heads) {
  if (!heads.some((one) => one.roles)) return [];
  const pairs = DATA.roles.flatMap((role) =>
    [...new Set(heads.flatMap((one) => (one.roles?.scores[role] ?? []).map(([data]) => data)))].map((data) => [role, data]));
  return [
    {
      key: "role", group: ROLES, name: "role", label: "role", unit: "the most specific role that is named", ends: () => null,
      of: (one) => (one.roles ? DATA.roles.indexOf(one.roles.role) : null), word: rolesNamed,
      rank: (one) => (one.roles?.role ? -DATA.roles.indexOf(one.roles.role) : -DATA.roles.length),
      paint: (one) => [roleTone(one.roles?.role), one.roles?.role ? 1 : 0],
    },
    ...pairs.map(([role, data]) => ({
      key: `role.${role}.${data}`, group: ROLES, name: "score", label: `${roleName(role)}, ${data}`, unit: DATA.role_units[role],
      of: (one) => roleScore(one, role, data)?.[1] ?? null, ends: (one) => roleScore(one, role, data)?.slice(2, 4),
    })),
  ];
}

// Scores have one scale, from 0 to 1; alignment, which may be backwards, from −1.
function roleScale(values) {
  const low = Math.min(...values) < 0 ? -1 : 0;
  return { low, high: 1, two: low < 0, amount: (value) => Math.abs(value) };
}

const roleTags = (heads) => DATA.roles.map((role) => [role, heads.filter((one) => one.roles?.role === role).length])
  .filter(([, count]) => count > 0)
  .map(([role, count]) => el("span", { class: "tag by-tone", "--tone": roleTone(role) }, `${roleName(role)} ${count}`));

// A row per role: the score with its interval on the data that decides, open circles on other data, and the null level.
const [AT, UPTO, STEP] = [112, 290, 24];
function roleChart(one) {
  if (!one.roles) return null;
  const roles = DATA.roles.filter((role) => one.roles.scores[role]), low = one.roles.scores.alignment ? -1 : 0;
  const x = (value) => AT + ((UPTO - AT) * (Math.max(value, low) - low)) / (1 - low), two = (value) => minus((Math.round(100 * value) / 100 + 0).toFixed(2));
  const drawn = roles.map((role, i) => {
    const y = 14 + STEP * i, [first, ...others] = one.roles.scores[role], [data, score, from, to, level] = first;
    const named = one.roles.named.includes(role);
    const between = from === null ? "" : ` (${two(from)} to ${two(to)})`;
    const other = ([on, value]) => draw("circle", { cx: x(value), cy: y, r: 3.5, class: "unsure" },
      draw("title", {}, `${on}: ${two(value)}`));
    return [
      draw("text", { x: 0, y: y + 4, class: named ? "named" : "" }, roleName(role)),
      draw("line", { x1: AT, x2: UPTO, y1: y, y2: y, class: "axis" }),
      draw("line", { x1: x(level), x2: x(level), y1: y - 7, y2: y + 7, class: "level" }),
      others.map(other),
      from === null ? null : draw("line", { x1: x(from), x2: x(to), y1: y, y2: y, class: "range by-tone", "--tone": roleTone(role) }),
      draw("circle", { cx: x(score), cy: y, r: 4.5, class: named ? "by-tone" : "unsure", "--tone": roleTone(role) }),
      draw("text", { x: UPTO + 14, y: y + 4, "data-role": role }, `${two(score)}${between}, null ${two(level)}, ${data}`),
    ];
  });
  const rows = () => [["role", "data", "score", "low", "high", "null"],
    ...roles.flatMap((role) => one.roles.scores[role].map((row) => [role, ...row]))];
  const note = "with 95 % intervals over sequences; bar: null level; filled: named; open and small: on other data";
  return framed("Roles", note, rows, "half",
    draw("svg", { viewBox: `0 0 570 ${STEP * roles.length + 6}`, role: "img", "aria-label": "scores by role" }, drawn));
}
