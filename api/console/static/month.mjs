export const month = { id: "month", title: "month", calls: [], scopes: "", async show() {} };
